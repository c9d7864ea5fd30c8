"""docs/environments.md: every environment in it is real, and its tables say what the code does."""

import re
import sys
import types

import pytest
import yaml

from headrace import config
from headrace.environment_kit import check
from headrace.environment_kit.check import Result
from headrace.environment_kit.rules import Settings
from services.envs.environment import Environment
from services.envs.server import EnvironmentServer
from tests.envs.conversation import listening
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "environments.md").read_text()
# Those that declare an environment; others call a gateway.
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "services.envs" in block]


def environments() -> dict[str, type[Environment]]:
    """The environments that the page's Python declares, by name."""
    found = {}
    for number, block in enumerate(BLOCKS):
        module = types.ModuleType(f"docs_environments_{number}")
        sys.modules[module.__name__] = module
        exec(compile(block, module.__name__, "exec"), vars(module))
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Environment)]
        found |= {kind.__name__: kind for kind in kinds if kind.__module__ == module.__name__}
    return found


ENVIRONMENTS = environments()


def test_each_block_holds_an_environment():
    assert len(ENVIRONMENTS) == len(BLOCKS) == 3


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_the_page_s_environments_keep_every_rule(name):
    settings = Settings(capacity=8, parallel=20, actions=("3", "HELLO"))
    async with listening(EnvironmentServer({name: ENVIRONMENTS[name]}, capacity=8)) as address:
        found = [finding async for finding in check.check(address, settings)]
    assert {finding.rule: finding.reason for finding in found if finding.result == Result.BROKEN} == {}


def test_the_page_names_every_rule_in_order():
    table = PAGE.partition("| rule | it holds when |")[2]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == check.NAMES


SECTIONS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_run_file_takes_the_page_s_sections(tmp_path, section):
    run = yaml.safe_load((ROOT / "configs" / "guess_number.yaml").read_text())
    run["environments"] = yaml.safe_load(section)["environments"]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    assert config.load(path).environments.keys() == run["environments"].keys()
