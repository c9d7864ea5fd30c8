"""docs/environment_catalog.md: every snippet starts, and every environment of the catalog has an entry."""

import re

import pytest
import yaml

from headrace.config.environment import Environment as Section
from headrace.errors import StartupError
from services.envs import catalog
from tests import processes

PAGE = (processes.ROOT / "docs" / "environment_catalog.md").read_text(encoding="utf-8")
SNIPPETS = {
    key: section
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for key, section in yaml.safe_load(block)["environments"].items()
}


@pytest.mark.parametrize("key", SNIPPETS)
def test_a_snippet_is_a_section_whose_class_takes_its_options(key):
    section = Section.model_validate(SNIPPETS[key])
    if section.implementation == "tau2":
        pytest.importorskip("tau2", reason="`make test-tau2` installs tau2")
    if section.implementation == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="reasoning_gym needs a C compiler to install")
    assert section.split in catalog.find(section.implementation, section.options)().splits


@pytest.mark.parametrize("name", sorted(catalog.CATALOG))
def test_the_page_tells_of_every_environment(name):
    assert f"`{name}`" in PAGE


def test_an_absent_package_names_the_extra_that_brings_it():
    if not _is_absent("tau2"):
        pytest.skip("tau2 is installed here")
    with pytest.raises(StartupError, match=r"No module named '.*'; install headrace\[tau2\]"):
        catalog.find("tau2", {})


def _is_absent(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return True
    return False
