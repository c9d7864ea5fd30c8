"""Imports go one way, services do not know each other, and no file grows past 400 lines without saying why."""

import ast
from pathlib import Path

import pytest

from tests.processes import ROOT

SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").exists())
SOURCES = sorted(
    path
    for folder in ("headrace", "services", "benchmarks", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "headrace" / "v1")
)
MOST_LINES = 400


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it; relative ones start with dots."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            names |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return names


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def files(package: str) -> list[Path]:
    return [path for path in SOURCES if path.is_relative_to(ROOT / package)]


def test_four_services_exist():
    assert SERVICES == ["envs", "inference", "rollout", "trainer"]


def test_headrace_imports_no_service():
    offenders = {
        path: name for path in files("headrace") for name in imports(path) if inside(name, "services", "tests")
    }
    assert not offenders


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_no_other(service):
    others = [f"services.{other}" for other in SERVICES if other != service]
    offenders = {
        path: name
        for path in files(f"services/{service}")
        for name in imports(path)
        if inside(name, *others, "tests", "benchmarks", "headrace.launch")
    }
    assert not offenders


def test_environment_servers_know_neither_jax_nor_redis():
    banned = ("jax", "flax", "redis", "headrace.stream", "transformers", "torch")
    offenders = {path: name for path in files("services/envs") for name in imports(path) if inside(name, *banned)}
    assert not offenders


def test_gateways_know_no_jax():
    banned = ("jax", "flax", "torch", "sgl_jax", "headrace.weights")
    offenders = {path: name for path in files("services/rollout") for name in imports(path) if inside(name, *banned)}
    assert not offenders


def test_imports_are_absolute():
    assert not {path: name for path in SOURCES for name in imports(path) if name.startswith(".")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_long_file_says_why_it_is_one_file(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= MOST_LINES or "one file because" in " ".join(docstring.lower().split())
