"""The rules that every environment server keeps, in whatever language it is written: what the proto's comments say.

A rule is a function that talks to the server and raises Broken, or Unchecked when it cannot tell. Its first docstring
line is the rule.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from headrace.environment_kit.episode import Broken, Episode, Refused, act, act_as, reset, task
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1.trajectory_pb2 import PURPOSE_DEMONSTRATION, Task, ToolCall

_ROLES_OF_A_PROMPT = {"system", "user", "assistant", "tool"}
_ROLES_OF_AN_ANSWER = {"user", "tool"}
# Longer than any turn limit in use; an episode that is open still needs the author's --action to be judged.
_MOST_ACTIONS = 200
RETRY_S = 0.05


class Unchecked(Exception):
    """The rule could not be checked; the message says why, and what would let it be."""


@dataclass(frozen=True)
class Settings:
    """What a person may tell the kit about a server."""

    actions: Sequence[str] = ("1", "yes", "a", "")
    """Replies, one after the other and again."""
    timeout_s: float = 60.0
    """For each response."""
    close_timeout_s: float = 10.0
    """For an environment to close when its stream is cancelled."""
    capacity: int | None = None
    """Episodes that the server takes at once; None: found out."""
    parallel: int = 500
    """Episodes at once that it must survive."""
    slow: bool = False
    """Whether to check what takes minutes."""
    slow_action: str | None = None
    """A reply to which the environment takes `slow_s` seconds; None: it is left alone for as long instead."""
    slow_s: float = 120.0


@dataclass(frozen=True)
class Subject:
    """One environment of one server."""

    stub: Any
    info: pb.EnvironmentInfo
    settings: Settings
    opened: list[Episode] = field(default_factory=list)
    """Streams of the rule that is being checked."""

    @property
    def split(self) -> str:
        return "train" if any(split.name == "train" for split in self.info.splits) else self.info.splits[0].name

    def task(self, **fields: Any) -> Task:
        """A task of its first split, for training."""
        return task(self.info.name, fields.pop("split", self.split), **{"task_id": "check", "index": 1, **fields})

    def open(self, timeout_s: float | None = None) -> Episode:
        """A stream on which nothing has been sent."""
        episode = Episode(self.stub, timeout_s=timeout_s or self.settings.timeout_s)
        self.opened.append(episode)
        return episode

    async def send_first(self, request: pb.InteractRequest, **settings: Any) -> tuple[Episode, pb.InteractResponse]:
        """A stream's first request and its response. While the server has no room it is tried again, as gateways do."""
        deadline = asyncio.get_running_loop().time() + self.settings.timeout_s
        wait_s = RETRY_S
        while True:
            episode = self.open(**settings)
            try:
                return episode, await episode.send(request)
            except Refused as refused:
                if refused.code != grpc.StatusCode.RESOURCE_EXHAUSTED or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)

    async def begin(self, **fields: Any) -> tuple[Episode, pb.InteractResponse]:
        """An episode of a task, and the response to its reset."""
        return await self.send_first(reset(self.task(**fields)))

    def reply(self, turn: int) -> pb.InteractRequest:
        return act(self.settings.actions[turn % len(self.settings.actions)])


async def described(subject: Subject) -> None:
    """ListEnvironments tells a name, a description of one line, and the splits."""
    info = subject.info
    if not info.description or "\n" in info.description:
        raise Broken(f"the description is {info.description!r}, not one line")
    names = [split.name for split in info.splits]
    if not names or len(set(names)) < len(names) or not all(names):
        raise Broken(f"the splits are {names}: at least one, each with a name of its own")
    if any(split.task_count < 0 for split in info.splits):
        raise Broken("a split has a negative task_count")
    if len(set(info.metric_names)) < len(info.metric_names):
        raise Broken(f"the metric names repeat: {list(info.metric_names)}")


async def first_response(subject: Subject) -> None:
    """A reset of any split is answered with the prompt and the tools, without reward or end."""
    for split in subject.info.splits:
        for index in (0, 2**40):
            episode, first = await subject.begin(split=split.name, index=index, seed=2**64 - 1)
            if first.terminated or first.truncated or first.HasField("reward"):
                raise Broken("the reset ended the episode or gave a reward, before there was an action", episode)
            _check_messages(first, _ROLES_OF_A_PROMPT, episode)
            for tool in first.tools:
                _check_tool(tool, episode)
            await episode.end()


async def one_answer(subject: Subject) -> None:
    """Each request gets exactly one response, and the client's end of the stream ends it with OK."""
    for actions in range(3):
        episode, response = await subject.begin(seed=actions)
        for turn in range(actions):
            if response.terminated or response.truncated:
                break
            response = await episode.send(subject.reply(turn))
            if response.tools:
                raise Broken("the answer to an action gave tools, which belong to the reset", episode)
            _check_messages(response, _ROLES_OF_AN_ANSWER, episode)
        await episode.end()


async def determinism(subject: Subject) -> None:
    """The same task and seed give the same episode to the same actions."""
    for seed in range(3):
        (first, once), (second, again) = await asyncio.gather(*(transcript(subject, seed) for _ in range(2)))
        if once != again:
            turn = next((number for number, (a, b) in enumerate(zip(once, again, strict=False)) if a != b), len(once))
            raise Broken(f"two episodes of one task differ at response {turn}", first, second)


async def malformed_action(subject: Subject) -> None:
    """A malformed action is answered with an observation, never raised."""
    episode, first = await subject.begin()
    await episode.end()
    names = [tool.name for tool in first.tools]
    odd = ("{}", '{"_": [null]}', '{"\\ud800": "\\ud800"}')
    calls = [ToolCall(id="call_0", name=name, arguments_json=text) for name in names for text in odd]
    wrong = [
        act(malformed=["no JSON at character 3", '"name" must be a string']),
        act(tool_calls=[ToolCall(id="call_0", name="no_such_tool", arguments_json="{}")]),
        *(act(tool_calls=[call]) for call in calls),
        *(act(content) for content in ("", "\0", "🙂" * 100, "<tool_call>{", "x" * 100_000, "9" * 10_000)),
    ]
    for request in wrong:
        episode, _ = await subject.begin()
        await episode.send(request)
        await episode.end()


async def reset_twice(subject: Subject) -> None:
    """A second reset, and an action before the first, are refused with FAILED_PRECONDITION."""
    out_of_order = grpc.StatusCode.FAILED_PRECONDITION
    episode, _ = await subject.begin()

    async def again() -> tuple[Episode, pb.InteractResponse]:
        return episode, await episode.send(reset(subject.task()))

    await _must_refuse(again, out_of_order, "a second reset")
    await _must_refuse(lambda: subject.send_first(act("1")), out_of_order, "an action before there was a reset")


async def unknown_task(subject: Subject) -> None:
    """An unknown environment or split is refused with NOT_FOUND."""
    unknown = grpc.StatusCode.NOT_FOUND
    stranger = reset(task(f"{subject.info.name}_no_such", subject.split))
    await _must_refuse(lambda: subject.send_first(stranger), unknown, "an unknown environment")
    await _must_refuse(lambda: subject.begin(split="no_such_split"), unknown, "an unknown split")


async def reward(subject: Subject) -> None:
    """Rewards are finite, an episode that ends had one, and it ends in one way."""
    for seed in range(4):
        for purpose in (PURPOSE_DEMONSTRATION, None):
            episode, responses = await _to_the_end(subject, seed, purpose)
            if responses is None:
                continue
            await episode.end()
            rewards = [response.reward for response in responses if response.HasField("reward")]
            if not all(math.isfinite(value) for value in rewards):
                raise Broken(f"the rewards are {rewards}", episode)
            if not rewards:
                raise Broken("the episode ended and no reward was given: 0 must be said", episode)
            if responses[-1].terminated and responses[-1].truncated:
                raise Broken("terminated and truncated are both set", episode)


async def metric_names(subject: Subject) -> None:
    """Metrics are finite and listed in metric_names."""
    for seed in range(4):
        episode, responses = await _to_the_end(subject, seed, None)
        await episode.end()
        for response in responses or ():
            for name, value in response.metrics.items():
                if name not in subject.info.metric_names:
                    raise Broken(f"the metric {name!r} is not listed in {list(subject.info.metric_names)}", episode)
                if not math.isfinite(value):
                    raise Broken(f"the metric {name!r} is {value}", episode)


async def demonstration(subject: Subject) -> None:
    """For PURPOSE_DEMONSTRATION each open response holds an assistant message; without an expert it is refused."""
    episode, responses = await _to_the_end(subject, 0, PURPOSE_DEMONSTRATION)
    if responses is None:
        raise Unchecked("it has no expert, and says so")
    await episode.end()
    if responses[-1].HasField("demonstration"):
        raise Broken("the last response demonstrates what nobody may do", episode)
    episode, first = await subject.begin()
    if first.HasField("demonstration"):
        raise Broken("a task for training was answered with a demonstration", episode)
    await episode.end()


async def after_the_end(subject: Subject) -> None:
    """An action after the end is not answered."""
    episode, responses = await _to_the_end(subject, 0, None)
    try:
        await episode.send(subject.reply(len(responses or ())))
    except Refused as refused:
        if refused.code not in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OK):
            raise
    else:
        raise Broken("an action after the episode's end was answered", episode)


async def long_step(subject: Subject) -> None:
    """A stream on which nothing happens for two minutes, as in a step of that length, lives on."""
    settings = subject.settings
    if not settings.slow:
        raise Unchecked(f"it takes {settings.slow_s:g} s: --slow checks it, --slow-action TEXT with a step that long")
    episode, _ = await subject.send_first(reset(subject.task()), timeout_s=settings.slow_s + settings.timeout_s)
    if settings.slow_action is not None:
        await episode.send(act(settings.slow_action))
    else:
        # To HTTP/2 a step that long and a policy that thinks that long are the same: an open stream without data.
        await asyncio.sleep(settings.slow_s)
        await episode.send(subject.reply(0))
    await episode.end()


async def transcript(subject: Subject, seed: int, *, turns: int = 4) -> tuple[Episode, list[bytes]]:
    """The first responses of a task to the kit's replies, in a form that compares; metrics may tell the time."""
    episode, response = await subject.begin(seed=seed, index=seed)
    responses = [response]
    while len(responses) <= turns and not (response.terminated or response.truncated):
        response = await episode.send(subject.reply(len(responses) - 1))
        responses.append(response)
    await episode.end()
    for response in responses:
        response.ClearField("metrics")
    return episode, [response.SerializeToString(deterministic=True) for response in responses]


async def _to_the_end(subject: Subject, seed: int, purpose: Any) -> tuple[Episode, list[pb.InteractResponse] | None]:
    """A whole episode, of the expert where `purpose` asks for one; None: there is none. Raises Unchecked."""
    purposes = {"purpose": purpose} if purpose else {}
    try:
        episode, first = await subject.begin(seed=seed, index=seed, **purposes)
    except Refused as refused:
        if purpose and refused.code == grpc.StatusCode.FAILED_PRECONDITION:
            return refused.episodes[0], None
        raise
    responses = [first]
    while not (responses[-1].terminated or responses[-1].truncated):
        if len(responses) > _MOST_ACTIONS:
            raise Unchecked(f"the episode is open after {_MOST_ACTIONS} actions: give --action TEXT that ends it")
        if not purpose:
            responses.append(await episode.send(subject.reply(len(responses) - 1)))
            continue
        shows = responses[-1].demonstration
        if shows.role != "assistant" or not (shows.content or shows.tool_calls):
            raise Broken("the episode is open but no assistant message demonstrates what to do", episode)
        responses.append(await episode.send(act_as(shows)))
    return episode, responses


async def _must_refuse(
    send: Callable[[], Awaitable[tuple[Episode, pb.InteractResponse]]], code: grpc.StatusCode, what: str
) -> None:
    try:
        episode, _ = await send()
    except Refused as refused:
        if refused.code != code:
            reason = f"{what} was refused with {refused.code.name}, not {code.name}"
            raise Broken(reason, *refused.episodes) from None
    else:
        raise Broken(f"{what} was answered, not refused with {code.name}", episode)


def _check_messages(response: pb.InteractResponse, roles: set[str], episode: Episode) -> None:
    if not response.messages and not (response.terminated or response.truncated):
        raise Broken("the episode is open but no message follows", episode)
    for message in response.messages:
        if message.role not in roles:
            raise Broken(f"a message has the role {message.role!r}, none of {sorted(roles)}", episode)


def _check_tool(tool: pb.Tool, episode: Episode) -> None:
    try:
        schema = json.loads(tool.parameters_json)
    except ValueError:
        schema = None
    if not tool.name or not isinstance(schema, dict) or schema.get("type") != "object":
        raise Broken(f"the tool {tool.name!r} has no JSON schema of an object as parameters_json", episode)
