"""The virtual environment that Tunix runs in: its own, for it needs other versions than Headrace."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.1.7"

# Its own pyproject excludes some releases of jax that the published wheel still resolves to.
_REQUIREMENTS = (f"google-tunix=={VERSION}", "jax!=0.7.2,<0.11", "safetensors<0.8", "psutil")


def ensure(folder: Path) -> Path:
    """The interpreter of the environment in `folder`, made (minutes) when it is not there yet."""
    python = folder / "bin" / "python"
    complete = folder / f"tunix-{VERSION}"
    if not complete.exists():
        print(f"installing Tunix {VERSION} into {folder} (once, takes minutes)", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        uv = shutil.which("uv")
        if uv:
            subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
            install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        else:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *_REQUIREMENTS], check=True)
        complete.touch()
    return python
