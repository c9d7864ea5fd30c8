"""What is generated is as fresh as what it is generated from."""

import pytest
import yaml

from tests.k8s.rendering import VALUES, tool
from tools import update_chart


def test_the_schema_knows_the_run_file_of_today():
    assert update_chart.SCHEMA.read_text() == update_chart.schema(), "run make chart"


@pytest.mark.parametrize("values", sorted(VALUES.glob("*.yaml")), ids=lambda path: path.stem)
def test_manifests_are_what_helm_renders(values):
    written = (update_chart.MANIFESTS / values.name).read_text()
    rendered = update_chart.manifest(tool("helm"), values)
    assert written == rendered, "run make chart"
    assert all(yaml.safe_load_all(written))


def test_there_is_no_manifest_without_values():
    names = {path.name for path in VALUES.glob("*.yaml")}
    assert {path.name for path in update_chart.MANIFESTS.glob("*.yaml")} == names
