"""Generates headrace/v1 from proto/ when the package is built; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProtos(build_py):
    def run(self) -> None:
        from tools.generate_protos import generate

        generate(Path(__file__).parent)
        self.finalize_options()
        super().run()


setup(cmdclass={"build_py": BuildWithProtos})
