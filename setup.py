"""Generates headrace/v1 from proto/ before setuptools looks for packages; everything else is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
runpy.run_path(str(ROOT / "tools" / "generate_protos.py"))["generate"](ROOT)

setup()
