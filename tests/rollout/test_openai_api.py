"""Agents outside drive episodes over OpenAI's HTTP: exact ids, whole groups, and never a reward that nobody gave."""

import asyncio
import contextlib
import dataclasses
import json

import aiohttp
import openai
import pytest
from google.protobuf.json_format import ParseDict

from headrace import config, stream
from headrace import trajectory as records
from headrace.security import PLAIN, Security
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.openai_api import OpenAiServer
from services.rollout.scheduler import Scheduler
from services.rollout.sessions import Agents
from services.rollout.slots import Slots
from tests import processes
from tests.engine_script import Script
from tests.rollout import rig
from tests.rollout.cluster import Cluster
from tests.rollout.episodes import ids, outcome
from tests.rollout.rig import VOCABULARY_SIZE, task
from tests.rollout.scripted_environment import ScriptedEnvironment, turns
from tests.scripted_engine import ScriptedEngine

TOKEN = "a-token-of-sixteen-and-more"
GUESS = {"role": "user", "content": "guess a number"}


class Gateway:
    """One gateway with an external environment, the trainer's end of its streams, and an HTTP client."""

    def __init__(self, engine, world, slots, *, streams, server, http):
        self.engine, self.world, self.slots, self.streams = engine, world, slots, streams
        self.server, self.http = server, http
        self.url = f"http://127.0.0.1:{server.port}"

    async def call(self, method, path, body=None, *, key=""):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def open(self, **body):
        status, session, _ = await self.call("POST", "/sessions", {"wait_s": 60, **body})
        assert status == 201, session
        return session

    async def complete(self, session, *messages, **body):
        return await self.call("POST", "/v1/chat/completions", {"messages": messages, **body}, key=session["id"])

    async def answer(self, session, *messages, **body):
        status, reply, _ = await self.complete(session, *messages, **body)
        assert status == 200, reply
        return reply["choices"][0]["message"]

    async def reward(self, session, reward, **body):
        status, reply, _ = await self.call("POST", f"/sessions/{session['id']}/reward", {"reward": reward, **body})
        assert status == 200, reply
        return ParseDict(reply["trajectory"], pb.Trajectory())

    async def issue(self, *tasks):
        await self.streams.issue(tasks, first_sequence=0)

    async def group(self):
        async with asyncio.timeout(60):
            while True:
                for entry in await self.streams.read_groups(1, 0.2):
                    group = pb.TrajectoryGroup.FromString(entry.payload)
                    records.check_group(group, run_id="run", vocabulary_size=VOCABULARY_SIZE)
                    return group


@pytest.fixture
def start(tmp_path, redis_url):
    @contextlib.asynccontextmanager
    async def start(script=None, *, security=PLAIN, external=None, **overrides):
        engine = await ScriptedEngine.start(script or Script(tokens=[[14], [15], [16]]), policy_version=3)
        environment = await ScriptedEnvironment.start(turns(1))
        client = stream.connect(redis_url, timeout_s=10)
        await client.flushdb()
        streams = stream.Streams(client, "run", claim_timeout_s=60)
        await streams.open()
        async with contextlib.AsyncExitStack() as stack:
            world = await stack.enter_async_context(
                rig.world(tmp_path, engines=[engine.url], environment=environment.address, **overrides)
            )
            section = config.Environment(driver="external", **(external or {}))
            agents = Agents("agents", section, world.renderer, thinking="apart")
            world = dataclasses.replace(world, environments={**world.environments, "agents": agents})
            slots = Slots(8)
            scheduler = Scheduler(streams, world, slots, gateway="gateway-0", run_id="run", claim_timeout_s=60)
            running = asyncio.create_task(scheduler.run())
            server = OpenAiServer(world, slots, security=security, draining=lambda: scheduler.draining)
            await server.start("127.0.0.1:0")
            http = await stack.enter_async_context(aiohttp.ClientSession())
            yield Gateway(engine, world, slots, streams=streams, server=server, http=http)
            await server.stop()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        await client.aclose()
        await environment.stop()
        await engine.stop()

    return start


def ticket(**changes):
    return task(environment="agents", **changes)


async def test_sessions_of_agents_make_a_group(start):
    async with start() as gateway:
        await gateway.issue(ticket())
        first, second = await gateway.open(), await gateway.open(environment="agents")
        assert first["task"] == {"id": "00000000", "split": "train", "index": 0, "seed": 0}
        assert first["purpose"] == "training" and first["id"] != second["id"]
        conversation = [GUESS]
        for _ in range(2):
            message = await gateway.answer(first, *conversation)
            conversation += [message, {"role": "user", "content": "higher"}]
        done = await gateway.reward(first, 0.0, metrics={"tries": 2})
        await gateway.answer(second, GUESS)
        await gateway.reward(second, 1.0)
        group = await gateway.group()
        sent = [request["input_ids"] for request in gateway.engine.requests]
    by_length = sorted(group.trajectories, key=lambda trajectory: -len(trajectory.turns))
    assert [records.total_reward(trajectory) for trajectory in by_length] == [0.0, 1.0]
    assert all(records.is_trainable(trajectory) and outcome(trajectory) == "COMPLETED" for trajectory in by_length)
    assert dict(by_length[0].metrics) == {"tries": 2.0}
    assert [m.role for m in by_length[0].messages] == ["user", "assistant", "user", "assistant"]
    # The ids that are trained are those that the engine saw, in the same order.
    assert sent[1] == records.context_token_ids(by_length[0].turns).tolist()[: len(sent[1])]
    assert ids(by_length[0].turns[0].action_token_ids) == [14]
    assert [span.policy_version for turn in by_length[0].turns for span in turn.version_spans] == [3, 3]
    assert done.turns == by_length[0].turns


async def test_the_openai_client_with_tools_and_streams(start):
    async with start(rollout__tool_parser="hermes") as gateway:
        session = await gateway.open(purpose="evaluation", task={"index": 3, "seed": 4, "split": "test"})
        assert session["task"]["index"] == 3 and session["purpose"] == "evaluation"
        async with openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
            messages = [{"role": "system", "content": "guess"}, GUESS]
            one = await client.chat.completions.create(model="policy", messages=messages, temperature=0.3)
            answer = one.choices[0].message
            assert one.usage.completion_tokens == 1 and one.usage.prompt_tokens > 3
            messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "higher"}]
            stream_ = await client.chat.completions.create(
                model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream_]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage.completion_tokens == 1 and chunks[-2].choices[0].finish_reason == "length"
        trajectory = await gateway.reward(session, 0.5)
        assert trajectory.messages[-1].content == text
        assert gateway.slots.free == 8
    assert records.total_reward(trajectory) == 0.5 and len(trajectory.turns) == 2


async def test_sampling_is_the_runs_own(start):
    async with start() as gateway:
        session = await gateway.open(task={})
        status, _, headers = await gateway.complete(session, GUESS, temperature=0.1, max_tokens=3)
        assert status == 200 and headers["x-headrace-ignored"] == "temperature,max_tokens"
        await gateway.reward(session, 1)
        assert gateway.engine.requests[0]["sampling_params"]["temperature"] == 1.0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda conversation: [{"role": "user", "content": "guess"}, *conversation[1:]], "messages[0] differs"),
        (lambda conversation: [conversation[0], {"role": "assistant", "content": "8"}, conversation[2]], "[1] differs"),
        (lambda conversation: [*conversation, {"role": "assistant", "content": "8"}], "has not written"),
        (lambda conversation: conversation[:2], "none is new"),
        (lambda conversation: [GUESS, GUESS], "[1] differs"),
    ],
)
async def test_an_edited_conversation_is_refused_and_the_session_goes_on(start, change, word):
    async with start() as gateway:
        session = await gateway.open(task={})
        conversation = [GUESS, await gateway.answer(session, GUESS), {"role": "user", "content": "higher"}]
        status, reply, _ = await gateway.complete(session, *change(conversation))
        assert status == 409 and word in reply["error"]["message"] and reply["error"]["code"] == "conversation_changed"
        await gateway.answer(session, *conversation)
        assert len((await gateway.reward(session, 1)).turns) == 2


async def test_a_repeated_request_gets_its_answer_again(start):
    async with start() as gateway:
        session = await gateway.open(task={})
        assert await gateway.answer(session, GUESS) == await gateway.answer(session, GUESS)
        assert len((await gateway.reward(session, 1)).turns) == 1


async def test_an_abandoned_session_is_offered_again_and_never_a_reward(start):
    limits = {"step_timeout_s": 0.3, "episode_attempts": 2}
    async with start(rollout__episode_timeout_s=60, external=limits) as gateway:
        await gateway.issue(ticket())
        silent = await gateway.open()
        await gateway.answer(silent, GUESS)
        gives_up = await gateway.open()
        status, _, _ = await gateway.call("DELETE", f"/sessions/{gives_up['id']}")
        assert status == 200
        again = [await gateway.open() for _ in range(2)]
        await gateway.answer(again[0], GUESS)
        await gateway.reward(again[0], 1)
        group = await gateway.group()  # the other says nothing either
        status, reply, _ = await gateway.complete(silent, GUESS)
        assert status == 410 and "said nothing for 0.3 s" in reply["error"]["message"]
    assert sorted(outcome(trajectory) for trajectory in group.trajectories) == ["COMPLETED", "ENVIRONMENT_ERROR"]
    (failed,) = [trajectory for trajectory in group.trajectories if not records.is_trainable(trajectory)]
    assert failed.cause == "abandoned" and failed.attempts == 2 and records.total_reward(failed) is None


async def test_an_episode_that_a_limit_ends_tells_its_agent(start):
    async with start(external={"max_turns": 1}) as gateway:
        session = await gateway.open(task={})
        answer = await gateway.answer(session, GUESS)
        status, reply, _ = await gateway.complete(session, GUESS, answer, GUESS)
        assert status == 410 and "truncated_turns" in reply["error"]["message"]
        status, reply, _ = await gateway.call("POST", f"/sessions/{session['id']}/reward", {"reward": 1})
        assert status == 410


async def test_an_engine_that_fails_ends_the_session(start):
    async with start(Script(fault="500", fault_rate=1), rollout__engine_attempts=2) as gateway:
        session = await gateway.open(task={})
        status, reply, _ = await gateway.complete(session, GUESS)
        assert status == 410 and "500 by the script" in reply["error"]["message"]


async def test_images_and_odd_requests_are_refused(start):
    async with start() as gateway:
        session = await gateway.open(task={})
        for body in (
            {"messages": []},
            {"messages": [{"role": "robot", "content": "a"}]},
            {"messages": [GUESS], "n": 2},
            {"messages": [GUESS], "stop": ["x"]},
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "["}}]}
                ]
            },
        ):
            status, reply, _ = await gateway.call("POST", "/v1/chat/completions", body, key=session["id"])
            assert status == 400 and reply["error"]["type"] == "invalid_request_error", body
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        status, reply, _ = await gateway.complete(session, {"role": "user", "content": [picture]})
        assert status == 410 and "no place for images" in reply["error"]["message"]


async def test_who_may_open_and_what_there_is_to_open(start):
    async with start(security=Security(tokens=(TOKEN,))) as gateway:
        body = {"wait_s": 0}
        assert (await gateway.call("POST", "/sessions", body))[0] == 401
        status, reply, _ = await gateway.call("POST", "/sessions", body, key=TOKEN)
        assert status == 503 and "no training task of agents waits" in reply["error"]["message"]
        for wrong, code in (
            ({"environment": "guess_number"}, 404),
            ({"purpose": "play"}, 400),
            ({"task": {}, "purpose": "training"}, 400),
            ({"task": {"index": "x"}}, 400),
            ({"wait_s": "x"}, 400),
        ):
            assert (await gateway.call("POST", "/sessions", {**body, **wrong}, key=TOKEN))[0] == code, wrong
        status, reply, _ = await gateway.call("POST", "/v1/chat/completions", {"messages": [GUESS]}, key="nobody")
        assert status == 401 and reply["error"]["code"] == "no_session"
        status, session, _ = await gateway.call("POST", "/sessions", {"task": {}}, key=TOKEN)
        assert status == 201
        for reward in (None, "1", True):
            path = f"/sessions/{session['id']}/reward"
            assert (await gateway.call("POST", path, {"reward": reward}))[0] == 400
        assert (await gateway.call("POST", path, {"reward": 1}))[0] == 409  # nothing was said yet
        assert json.dumps((await gateway.call("GET", "/v1/models"))[1]).count('"policy"') == 1


async def test_a_demonstration_and_a_waiting_group_end(start):
    async with start(rollout__group_timeout_s=0.5) as gateway:
        await gateway.issue(ticket(purpose=pb.PURPOSE_DEMONSTRATION), ticket(number=1))
        groups = [await gateway.group() for _ in range(2)]
    causes = sorted(trajectory.cause for group in groups for trajectory in group.trajectories)
    assert causes == ["refused", "straggler", "straggler"]
    assert not any(records.is_trainable(trajectory) for group in groups for trajectory in group.trajectories)


async def test_a_gateway_process_serves_agents(tmp_path):
    with contextlib.ExitStack() as stack:
        agents = {"driver": "external"}
        run = Cluster(tmp_path, stack, script={"tokens": "random"}, environments__agents=agents)
        with pytest.raises(RuntimeError, match=r"environments\.agents\.driver: is external"):
            run.gateway("gateway-1")
        port = processes.free_port()
        run.gateway("gateway-0", "--openai-listen", f"127.0.0.1:{port}")
        await run.streams.open()
        await run.streams.issue([ticket()], first_sequence=0)
        async with aiohttp.ClientSession() as http:
            for reward in (0.0, 1.0):
                async with http.post(f"http://127.0.0.1:{port}/sessions", json={"wait_s": 60}) as response:
                    session = await response.json()
                async with openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
                    await client.chat.completions.create(model="policy", messages=[GUESS])
                path = f"http://127.0.0.1:{port}/sessions/{session['id']}/reward"
                async with http.post(path, json={"reward": reward}) as response:
                    assert response.status == 200
        (group,) = await run.groups(1)
    assert sorted(records.total_reward(trajectory) for trajectory in group.trajectories) == [0.0, 1.0]
