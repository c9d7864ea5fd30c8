"""Wrong values are refused, in words that name the key; every value is in the schema, with its meaning."""

import json

import pytest
import yaml

from tests.k8s.rendering import CHART, VALUES, helm, refusal

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


@pytest.mark.parametrize("program", ["helm", "helm3"])
@pytest.mark.parametrize("values", [path.name for path in sorted(VALUES.glob("*.yaml"))])
def test_lint(values, program):
    done = helm("lint", "--strict", str(CHART), "--values", str(VALUES / values), program=program)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "sets", "words"),
    [
        # The schema's.
        ("laptop", ["gateway.replicaz=2"], ["replicaz"]),
        ("laptop", ["config.trainer.stepz=2"], ["stepz"]),
        ("laptop", ["config.trainer.steps=0"], ["/config/trainer/steps"]),
        ("laptop", ["config.rollout.group_size=null"], ["/config/rollout", "group_size"]),
        ("laptop", ['inference.autoscaling.kind="vpa"'], ["/inference/autoscaling/kind"]),
        ("laptop", ['gateway.podDisruptionBudget={"minAvailable":1}'], ["/gateway/podDisruptionBudget"]),
        ("laptop", ["gateway.terminationGracePeriodSeconds=0"], ["terminationGracePeriodSeconds"]),
        ("laptop", ['redis.maxMemory="3GiB"'], ["/redis/maxMemory"]),
        ("v5e-8", ['trainer.tpu.accelerator="tpu-v5e-slice"'], ["/trainer/tpu/accelerator"]),
        ("v5e-8", ["trainer.tpu.chipsPerHost=2"], ["/trainer/tpu/chipsPerHost"]),
        ("laptop", ['trainer.tpu={"hosts":2}'], ["/trainer/tpu"]),
        # The templates'.
        ("laptop", ['config.run.directory="runs"'], ["config.run.directory must not be set"]),
        ("laptop", ['config.redis={"url":"redis://:secret@h/0"}'], ["config.redis.url must not be set"]),
        ("laptop", ["config.rollout.replicas=2"], ["config.rollout.replicas", "gateway.replicas"]),
        ("laptop", ["config.inference.replicas=2"], ["config.inference.replicas"]),
        ("laptop", ['config.inference.addresses=["h:1"]'], ["config.inference.addresses", "inference.enabled"]),
        ("laptop", ["inference.enabled=false"], ["name the engines"]),
        ("laptop", ["environments.absent={}"], ["environments.absent"]),
        ("laptop", ['config.environments.guess-number={"class":"guess_number"}'], ["guess-number", "rename one"]),
        ("laptop", ['config.environments.a!={"class":"guess_number"}'], ["a!", "name it with"]),
        ("laptop", ["redis.enabled=false"], ["redis.external.existingSecret"]),
        ("laptop", ['config.security={"token_file":"t"}'], ["config.security must not be set", "tls and auth"]),
        ("laptop", ['auth.existingSecret="t"'], ["plaintext is no secret", "tls.existingSecret"]),
        ("laptop", ['tls.existingSecret="c"'], ["guess_number", "environment.tlsSecret"]),
        ("laptop", ['tls.existingSecret="c"', 'environment.tlsSecret="c"'], ["must not hold the other services' key"]),
        ("laptop", ["config.environments.guess_number.tls=true"], ["config.environments.guess_number", "tlsSecret"]),
        (
            "laptop",
            ['config.environments.a={"address":"h:1","tls":true,"token_file":"/t"}'],
            ["/etc/headrace-environment-tokens/a", "auth.environmentsSecret"],
        ),
        ("laptop", ['config.telemetry.traces.endpoint="http://c:4318"'], ["networkPolicy.traceCollector"]),
        ("laptop", ["gateway.autoscaling.minReplicas=99"], ["gateway.autoscaling.minReplicas 99"]),
        ("laptop", ["gateway.terminationGracePeriodSeconds=14"], ["gateway.terminationGracePeriodSeconds 14"]),
        ("laptop", ["inference.terminationGracePeriodSeconds=12"], ["inference.terminationGracePeriodSeconds 12"]),
        ("laptop", ['config.inference.device="tpu"'], ["config.inference.device is tpu"]),
        ("laptop", ['config.model={"path":"/models/a","create":null}'], ["storage.models"]),
        ("v5e-8", ['config.model.path="/data/a"'], ["/models"]),
        ("v5e-8", ['trainer.tpu.topology="4x4"'], ["topology 4x4 has 16 chips", "are 8"]),
        ("v5e-8", ['trainer.tpu.topology="2x2x2"'], ["has 2 sides"]),
        ("v5e-8", ["config.trainer.mesh.fsdp=4"], ["config.trainer.mesh", "8 chips"]),
        ("v6e-8", ["config.inference.tensor_parallel=4"], ["tensor_parallel must be 8"]),
        ("v5p-multi-host", ['storage.run={"gcs":{"bucket":""}}'], ["hosts share the run's folder"]),
        ("v5e-8", ['storage.models.existingClaim="c"'], ["not both"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0][:60],
)
def test_wrong_values_are_refused(values, sets, words):
    message = refusal(values, *sets)
    assert [word for word in words if word not in message] == [], message


def test_a_chart_without_a_run_file_says_so():
    done = helm("template", "run", str(CHART))
    assert done.returncode != 0
    assert "/config" in done.stderr


def test_a_release_name_that_is_no_run_id_is_refused():
    done = helm("template", "my.run", str(CHART), "--values", str(VALUES / "laptop.yaml"))
    assert "set config.run.id" in done.stderr


def properties(schema, path=""):
    """(path, schema) of each property, through references within the chart's own part."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        schema = SCHEMA["$defs"][name] if name != "config" else {}
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}", inner
        yield from properties(inner, f"{path}{name}.")


def test_every_value_has_a_meaning_and_every_default_is_in_the_schema():
    known = dict(properties(SCHEMA))
    silent = [path for path, schema in known.items() if "description" not in schema and "$ref" not in schema]
    assert silent == []

    free = {path for path, schema in known.items() if schema.get("additionalProperties", False)}

    def paths(node, prefix=""):
        for key, value in node.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict) and f"{prefix}{key}" not in free:
                yield from paths(value, f"{prefix}{key}.")

    defaults = list(paths(yaml.safe_load((CHART / "values.yaml").read_text())))
    assert [path for path in defaults if path not in known] == []


def test_notes_tell_the_next_three_commands():
    done = helm("install", "run", str(CHART), "--dry-run=client", "--values", str(VALUES / "v5p-multi-host.yaml"))
    notes = done.stdout[done.stdout.index("NOTES:") :]
    for command in (
        "rollout status deployment/run-headrace-inference",
        "helm test run",
        "logs --follow",
        "delete jobset",
    ):
        assert command in notes
