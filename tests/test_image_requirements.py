"""Each image's lock file has what its service imports: found without docker, from the sources."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("headrace", "services")
LOCKS = {
    "envs": ["envs"],
    "rollout": ["rollout"],
    "trainer": ["trainer", "trainer-tpu", "trainer-cuda"],
    "inference": ["inference", "inference-tpu", "inference-cuda"],
}


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported when this one is: not in a function, nor for types alone, nor where it may fail."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Try)):
            yield from imports(node)


def source(module: str) -> Path | None:
    """Where one of our modules is; None for what is no module."""
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def third_party(start: str) -> set[str]:
    """Top-level names of all that is imported from elsewhere when the module is."""
    seen, found, ahead = set(), set(), [start]
    while ahead:
        module = ahead.pop()
        if module in seen:
            continue
        seen.add(module)
        if module.split(".")[0] not in OURS:
            found.add(module.split(".")[0])
        elif path := source(module):
            ahead += imports(ast.parse(path.read_text()))
    return found - set(sys.stdlib_module_names)


@functools.cache
def distributions() -> dict[str, set[str]]:
    """Which packages each top-level name may come from, as lock files spell them."""
    known = importlib.metadata.packages_distributions()
    return {name: {re.sub(r"[-_.]+", "-", package).lower() for package in known[name]} for name in known}


@pytest.mark.parametrize(("service", "lock"), [(service, lock) for service in LOCKS for lock in LOCKS[service]])
def test_a_lock_has_what_its_service_imports(service, lock):
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / f"{lock}.lock").read_text(), re.MULTILINE))
    needed = third_party(f"services.{service}.__main__")
    assert {name for name in needed if not distributions()[name] & locked} == set(), "run make lock"


def test_imports_are_followed():
    assert {"jax", "redis", "pydantic"} <= third_party("services.trainer.__main__")
    assert "jax" not in third_party("services.rollout.__main__")
