"""The whole loop over TLS, with client certificates and tokens, and traced: everything real, as processes."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request

import grpc
import pytest

from headrace import security, tracing
from headrace.security import Security
from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import (
    environment_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    trainer_service_pb2_grpc,
)
from headrace.v1 import trainer_service_pb2 as pb
from tests.certificates import TOKEN, Authority, token_file
from tests.collector import Collector
from tests.loop_run import LoopRun

pytestmark = pytest.mark.timeout(600)

ENVIRONMENT_TOKEN = "the-token-of-guess-number"
RATIO = 0.5


class Ended:
    """The run when it has ended, and what was tried on it while it went."""

    def __init__(self, run, collector, refusals):
        self.run, self.collector, self.refusals = run, collector, refusals
        self.traces = [spans for spans in collector.traces.values() if any(span.name == "episode" for span in spans)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secured")
    files = Authority(folder).issue("service")
    changes = {
        "trainer.steps": 2,
        "trainer.stop_at_reward": None,
        "trainer.groups_per_step": 8,
        "trainer.minibatches": 1,
        "trainer.optimizer.warmup_steps": 1,
        "security": {
            "tls": {**{name: str(path) for name, path in files._asdict().items()}, "client_certificates": True},
            "token_file": str(token_file(folder)),
        },
        "environments.guess_number.token_file": str(token_file(folder, ENVIRONMENT_TOKEN, name="environment-token")),
    }
    with Collector() as collector:
        changes["telemetry.traces"] = {"endpoint": collector.endpoint, "sample_ratio": RATIO}
        with LoopRun(folder, changes=changes) as run:
            run.start()
            run.wait_for_step(1)
            ours = security.read(run.config.security.tls, run.config.security.token_file)
            refusals = _refusals(run, ours)
            run.wait()
        yield Ended(run, collector, refusals)


def _refusals(run, ours):
    """What each service says to a caller without the right token."""
    bare = Security(ours.tls)
    addresses = run.config
    environment = addresses.environments["guess_number"].address
    return {
        "trainer": _call(addresses.trainer.address, bare, _ask_trainer),
        "gateway": _call(run.listen["gateway-0"], bare, _ask_gateway),
        "environment": _call(environment, ours, _ask_environment),  # the run's token is not its own
        "engine": _post(addresses.inference.addresses[0], ours),
    }


def _call(address, caller, ask):
    with grpc.secure_channel(address, caller.channel_credentials()) as channel:
        try:
            ask(channel)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


def _ask_trainer(channel):
    trainer_service_pb2_grpc.TrainerServiceStub(channel).GetTrainerStatus(pb.GetTrainerStatusRequest(), timeout=60)


def _ask_gateway(channel):
    stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
    stub.GetRolloutStatus(rollout_service_pb2.GetRolloutStatusRequest(), timeout=60)


def _ask_environment(channel):
    stub = environment_service_pb2_grpc.EnvironmentServiceStub(channel)
    stub.ListEnvironments(environment_pb.ListEnvironmentsRequest(), timeout=60)


def _post(address, ours):
    context = ssl.create_default_context(cadata=ours.tls.authority.decode())
    for path in ("health", "ready", "metrics"):
        with urllib.request.urlopen(f"https://{address}/{path}", context=context, timeout=60) as response:
            assert response.status == 200
    request = urllib.request.Request(f"https://{address}/generate", data=b"{}")
    try:
        urllib.request.urlopen(request, context=context, timeout=60)
    except urllib.error.HTTPError as error:
        return f"{error.code}: {json.load(error)['error']['message']}"
    return "OK"


def test_the_loop_trains(ended):
    assert [line["step"] for line in ended.run.metrics()] == [1, 2]


def test_nobody_answers_without_the_right_token(ended):
    words = "this server asks for a token"
    assert ended.refusals["trainer"].startswith(f"UNAUTHENTICATED: {words}")
    assert ended.refusals["gateway"].startswith(f"UNAUTHENTICATED: {words}")
    assert ended.refusals["environment"].startswith("UNAUTHENTICATED: the token is wrong")
    assert ended.refusals["engine"].startswith(f"401: {words}")


def test_no_log_holds_a_token(ended):
    for process in ended.run.processes.values():
        assert TOKEN not in process.output
        assert ENVIRONMENT_TOKEN not in process.output
        assert "PRIVATE KEY" not in process.output


def test_a_trajectory_is_one_tree_through_every_service(ended):
    trained = [spans for spans in ended.traces if any(span.name == "train" for span in spans)]
    assert trained
    for spans in trained:
        by_id = {span.ids.span_id: span for span in spans}
        assert len(by_id) == len(spans)
        (root,) = (span for span in spans if not span.parent_id)
        assert root.name == "episode"

        def parents(name, spans=spans, by_id=by_id):
            return {by_id[span.parent_id].name for span in spans if span.name == name}

        assert parents("session") == parents("publish") == parents("train") == {"episode"}
        assert parents("engine call") == parents("Interact") == {"session"}
        assert parents("reset") == parents("step") == {"session", "Interact"}
        assert parents("generate") == {"engine call"}
        services = {span.name: span.service for span in spans if span.name not in ("reset", "step")}
        assert services == {
            "episode": "headrace-gateway",
            "session": "headrace-gateway",
            "engine call": "headrace-gateway",
            "publish": "headrace-gateway",
            "generate": "headrace-engine",
            "Interact": "headrace-environment",
            "train": "headrace-trainer",
        }
        assert all(span.start_ns <= span.end_ns for span in spans)


def test_ids_follow_from_the_record_and_say_who_is_traced(ended):
    for spans in ended.traces:
        (root,) = (span for span in spans if not span.parent_id)
        name = root.attributes["headrace.trajectory_id"]
        assert root.ids == tracing.trajectory_ids("loop", name, "gateway-0")
        assert tracing.is_sampled(root.ids.trace_id, RATIO)
    trajectories = sum(line["trajectories"] for line in ended.run.metrics())
    assert 0 < sum(span.name == "train" for span in ended.collector.spans) < trajectories


def test_calls_tell_their_engine_their_tokens_and_their_versions(ended):
    calls = [span for span in ended.collector.spans if span.name == "engine call"]
    url = f"https://{ended.run.config.inference.addresses[0]}"
    for call in calls:
        if "headrace.tokens" in call.attributes:  # it was not cut off by the run's end
            assert call.attributes["headrace.engine"] == url
            assert call.attributes["headrace.tokens"] >= 1
            assert call.attributes["headrace.policy_versions"].values[0].int_value >= 1


def test_a_train_step_and_its_trajectories_are_linked(ended):
    steps = {span.ids: span for span in ended.collector.spans if span.name == "train step"}
    assert sorted(span.attributes["headrace.step"] for span in steps.values()) == [1, 2]
    trained = [span for span in ended.collector.spans if span.name == "train"]
    for span in trained:
        (link,) = span.links
        step = steps[link]
        assert step.attributes["headrace.step"] == span.attributes["headrace.step"]
        assert span.ids.trace_id in {ids.trace_id for ids in step.links}
    assert sum(len(step.links) for step in steps.values()) == len(trained)
