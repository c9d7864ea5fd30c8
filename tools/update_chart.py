"""Brings what is generated for Kubernetes up to date: the schema of the chart's `config`, and k8s/manifests.

    python -m tools.update_chart [HELM]

The schema comes from headrace/config/, so Helm refuses a wrong run file before a pod starts. The manifests are the
chart rendered with each file of k8s/values, for people who use plain kubectl. Tests compare both with what is checked
in.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace.config import Config

ROOT = Path(__file__).parent.parent
CHART = ROOT / "k8s" / "headrace"
SCHEMA = CHART / "values.schema.json"
MANIFESTS = ROOT / "k8s" / "manifests"
VALUES = ROOT / "k8s" / "values"


def main() -> None:
    helm = sys.argv[1] if len(sys.argv) > 1 else "helm"
    SCHEMA.write_text(schema())
    MANIFESTS.mkdir(exist_ok=True)
    for values in sorted(VALUES.glob("*.yaml")):
        (MANIFESTS / values.name).write_text(manifest(helm, values))


def schema() -> str:
    """The chart's schema, its part about the run file made anew."""
    tree = json.loads(SCHEMA.read_text())
    config = Config.model_json_schema(by_alias=True, ref_template="#/$defs/config/$defs/{model}")
    tree["$defs"]["config"] = _without_titles(config)
    return json.dumps(tree, indent=2) + "\n"


def manifest(helm: str, values: Path) -> str:
    """What `helm install headrace` would create, without the hooks, for which kubectl has no use."""
    command = [helm, "template", "headrace", str(CHART), "--namespace", "headrace", "--values", str(values)]
    text = subprocess.run([*command, "--no-hooks"], check=True, capture_output=True, text=True, timeout=60).stdout
    head = f"# Rendered from k8s/values/{values.name} by `make chart`; change that file or the chart instead.\n"
    return head + "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())


def _without_titles(node: Any) -> Any:
    """The schema without pydantic's titles, which only repeat keys."""
    if isinstance(node, dict):
        return {
            key: _without_titles(value)
            for key, value in node.items()
            if not (key == "title" and isinstance(value, str))
        }
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    return node


if __name__ == "__main__":
    main()
