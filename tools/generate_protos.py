"""Generates the Python stubs of proto/headrace/v1 into headrace/v1: `python -m tools.generate_protos`."""

from pathlib import Path

from grpc_tools import protoc


def generate(root: Path) -> None:
    """Writes headrace/v1/*_pb2{,_grpc}.py and .pyi under `root`. Raises RuntimeError when protoc refuses a file."""
    package = root / "headrace" / "v1"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    sources = sorted(str(path) for path in (root / "proto" / "headrace" / "v1").glob("*.proto"))
    arguments = [f"-I{root / 'proto'}"]
    outputs = [f"--{kind}={root}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    if protoc.main(["protoc", *arguments, *outputs, *sources]) != 0:
        raise RuntimeError("protoc refused a file of proto/headrace/v1; its message is above")


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent.parent)
