"""Images start trainers and engines with the settings of malloc that `headrace run` starts them with."""

import re

import pytest

from headrace.local_run import KEEP_FREED_MEMORY
from tests.processes import ROOT


@pytest.mark.parametrize("service", ["trainer", "inference"])
def test_images_keep_freed_memory(service):
    final = (ROOT / "services" / service / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert dict(re.findall(r"(MALLOC_\w+)=(\d+)", final)) == KEEP_FREED_MEMORY
