"""docs/sandbox.md says what the code claims."""

import re
from pathlib import Path

from services.envs.sandbox.choice import Choice
from services.envs.sandbox.hazards import Strength, table
from services.envs.sandbox.sandbox import Ending, Limits

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "sandbox.md").read_text()


def test_its_table_is_that_of_the_claims():
    assert table() in TEXT


def test_it_names_every_option():
    for name in (*vars(Limits()), *vars(Choice())):
        assert f"`{name}`" in TEXT, name
    for value in (*Strength, *Ending):
        assert f"`{value.value}`" in TEXT, value


def test_its_defaults_are_those_of_the_code():
    defaults = vars(Limits()) | {name: value for name, value in vars(Choice()).items() if name != "limits"}
    for name, default in re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", TEXT, re.MULTILINE):
        shown = defaults[name].value if isinstance(defaults[name], Strength) else defaults[name]
        assert default == str(shown).lower() if isinstance(shown, bool) else default == str(shown), name
