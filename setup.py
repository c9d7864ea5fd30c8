"""Generates headrace/v1 from proto/ when the package is built; everything else is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProtos(build_py):
    def run(self) -> None:
        root = Path(__file__).resolve().parent
        runpy.run_path(str(root / "tools" / "generate_protos.py"))["generate"](root)
        self.finalize_options()
        super().run()


setup(cmdclass={"build_py": BuildWithProtos})
