"""Validates Kubernetes objects against the schemas of Kubernetes releases and of custom resources.

    python -m tools.validate_manifests --kubernetes 1.33 … [--crds FOLDER] < OBJECTS.json > ERRORS.json

stdin holds a JSON list of objects; stdout gets a JSON list of [index, schema, message], empty if all are right. Fields
that a schema does not know are errors. Of a custom resource without a schema in FOLDER the pods inside are validated.
It needs what requirements-k8s.lock lists, in an environment of its own, and nothing else of the project.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

Object = dict[str, Any]

# Groups whose objects Kubernetes itself does not know.
_CUSTOM = (
    "jobset.x-k8s.io",
    "leaderworkerset.x-k8s.io",
    "keda.sh",
    "monitoring.googleapis.com",
    "monitoring.coreos.com",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Validates Kubernetes objects, JSON from stdin.")
    parser.add_argument("--kubernetes", action="append", required=True, metavar="VERSION")
    parser.add_argument("--crds", type=Path, metavar="FOLDER", help="custom resource definitions, YAML")
    args = parser.parse_args()
    schemas = read_custom_schemas(args.crds) if args.crds else {}
    errors = [
        (index, schema, message)
        for index, item in enumerate(json.load(sys.stdin))
        for schema, message in validate(item, args.kubernetes, schemas)
    ]
    json.dump(errors, sys.stdout)


def validate(item: Object, versions: list[str], schemas: dict[tuple[str, str], Any]) -> Iterator[tuple[str, str]]:
    """(schema, message) of each error in one object."""
    kind = (item.get("apiVersion", ""), item.get("kind", ""))
    if kind in schemas:
        for error in schemas[kind].iter_errors(item):
            yield kind[1], f"{error.json_path}: {error.message[:300]}"
    elif kind[0].split("/")[0] not in _CUSTOM:
        yield from _validate_core(item, versions)
    for inner in embedded(item):
        yield from _validate_core(inner, versions)


def embedded(item: Object) -> Iterator[Object]:
    """Core objects that stand inside a custom one."""
    if item["kind"] == "JobSet":
        for job in item["spec"]["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
    if item["kind"] == "LeaderWorkerSet":
        for name in ("leaderTemplate", "workerTemplate"):
            template = item["spec"]["leaderWorkerTemplate"].get(name)
            if template:
                yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}


def read_custom_schemas(folder: Path) -> dict[tuple[str, str], Any]:
    """A validator for each (apiVersion, kind) that the folder defines."""
    schemas = {}
    for path in sorted(folder.glob("*.yaml")):
        for definition in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            if not definition or definition.get("kind") != "CustomResourceDefinition":
                continue
            spec = definition["spec"]
            for version in spec["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                schemas[(f"{spec['group']}/{version['name']}", spec["names"]["kind"])] = _validator(schema)
    podmonitoring = folder / "podmonitoring_v1.json"
    if podmonitoring.exists():
        schema = json.loads(podmonitoring.read_text())
        schemas[("monitoring.googleapis.com/v1", "PodMonitoring")] = _validator(schema)
    return schemas


def _validate_core(item: Object, versions: list[str]) -> Iterator[tuple[str, str]]:
    for version in versions:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            yield version, f"{path}: {error.message[:300]}"
        except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.InvalidSchemaError) as error:
            yield version, str(error)


def _validator(schema: Any) -> Any:
    closed = _close(schema)
    closed.setdefault("properties", {})["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(closed)


def _close(schema: Any) -> Any:
    """The schema with what an API server adds to it: unknown fields are errors, quantities are text or numbers."""
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: _close(value) for key, value in schema.items() if key not in ("description", "format", "default")}
    if "properties" in schema:
        closed["properties"] = {name: _close(value) for name, value in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed["additionalProperties"] = False
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        closed["type"] = [schema["type"], "null"]
    return closed


if __name__ == "__main__":
    main()
