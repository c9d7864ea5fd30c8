"""Files of JSON objects, one a line. Those that tell of steps keep in step with the checkpoint: a resumed run
forgets the lines of lost steps.

A line is complete or absent: a torn last line, which a full disk or a crash may leave, is cut off at the start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """An append-only file of JSON lines, each with a "step"."""

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Adds a line and hands it to the operating system."""
        with self._path.open("a") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """The complete lines."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def forget_after(self, step: int) -> None:
        """Drops the lines of later steps."""
        kept = [entry for entry in self.read() if entry["step"] <= step]
        replacement = self._path.with_suffix(".new")
        replacement.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(replacement, self._path)
