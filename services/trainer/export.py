"""Writes a checkpoint's policy as a Hugging Face folder: `python -m services.trainer.export RUN_FOLDER FOLDER`.

A run that ends writes its last policy itself, to policy/; this is for every other checkpoint, and for runs that were
stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace import config as configs
from headrace import model_folder, rpc
from headrace.errors import StartupError
from services.trainer.build import build
from services.trainer.model import huggingface


def export(run_folder: Path, folder: Path, *, step: int | None = None, dtype: huggingface.Dtype = "float32") -> int:
    """Writes the folder and returns the checkpoint's step.

    Args:
        run_folder: the folder that `headrace run` made: config.yaml, checkpoints/.
        folder: is made, or gets these weights; transformers and SGLang-JAX load it.
        step: which checkpoint; None is the newest.
        dtype: of the weights; checkpoints hold float32.

    Raises:
        StartupError: there is no such run or checkpoint.
    """
    if not (run_folder / "config.yaml").exists():
        raise StartupError(f"{run_folder} holds no config.yaml; give the folder of a run, for example runs/ID")
    absolute = run_folder.absolute()
    overrides = {"run.directory": str(absolute.parent), "run.id": absolute.name}
    config = configs.load(run_folder / "config.yaml", overrides=overrides)
    source = model_folder.ensure(config)
    model = build(config, source, step=step)
    if model.notes is None:
        raise StartupError(f"{run_folder / 'checkpoints'} holds no checkpoint; let the run go on until it makes one")
    huggingface.save_folder(folder, model.policy.state.parameters, source=source, dtype=dtype)
    return model.notes.step


async def _run(arguments: argparse.Namespace) -> None:
    step = export(arguments.run_folder, arguments.folder, step=arguments.step, dtype=arguments.dtype)
    print(f"wrote the policy of step {step} to {arguments.folder}")


def main() -> None:
    """Parses the command line and exports."""
    parser = argparse.ArgumentParser(
        prog="headrace export", description="Writes a checkpoint's policy as a Hugging Face folder."
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="the run's folder, for example runs/ID")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the Hugging Face folder goes")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default %(default)s")
    arguments = parser.parse_args()
    rpc.main(lambda: _run(arguments))


if __name__ == "__main__":
    main()
