"""A person in the policy's place: an episode in the terminal.

A line is the assistant's message; a \\ at its end continues it. `/NAME {"argument": 1}` or `/NAME argument=1` calls a
tool, several of them separated by ` ;; ` in one turn; `/malformed TEXT` is a call that could not be parsed; `/quit`
leaves. It blocks, one thing at a time, as a person does.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any, TextIO

import grpc

from headrace import rpc
from headrace.environment_kit.check import offers
from headrace.environment_kit.episode import act, reset, task
from headrace.security import PLAIN, Security
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc as pb_grpc
from headrace.v1.trajectory_pb2 import ToolCall

_CONNECT_S = 20.0


async def offered(address: str, environment: str | None, security: Security) -> pb.EnvironmentInfo:
    """The environment that the server offers, or the one that is named. Raises StartupError."""
    async with rpc.channel(address, foreign=True, security=security) as channel:
        stub = pb_grpc.EnvironmentServiceStub(channel)  # type: ignore[no-untyped-call]
        return (await offers(stub, address, environment, timeout_s=_CONNECT_S, security=security))[0]


def play(
    address: str,
    info: pb.EnvironmentInfo,
    source: TextIO,
    output: TextIO,
    *,
    split: str | None,
    index: int,
    seed: int,
    security: Security = PLAIN,
) -> int:
    """Plays one episode; the exit code: 0, or 1 when the server failed."""
    with _channel(address, security) as channel:
        stub = pb_grpc.EnvironmentServiceStub(channel)  # type: ignore[no-untyped-call]
        known = [offer.name for offer in info.splits]
        first_split = split or ("train" if "train" in known or not known else known[0])
        requests: queue.SimpleQueue[pb.InteractRequest | None] = queue.SimpleQueue()
        requests.put(reset(task(info.name, first_split, task_id="play", index=index, seed=seed)))
        responses = stub.Interact(iter(requests.get, None))
        try:
            return _converse(responses, requests, source, output)
        except grpc.RpcError as error:
            print(f"the server ended the episode: {error.code().name}: {error.details()}", file=output)
            return 1
        finally:
            requests.put(None)
            responses.cancel()


def _channel(address: str, security: Security) -> grpc.Channel:
    options = [("grpc.max_receive_message_length", rpc.MESSAGE_LIMIT_BYTES)]
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _converse(
    responses: Iterator[pb.InteractResponse],
    requests: queue.SimpleQueue[pb.InteractRequest | None],
    source: TextIO,
    output: TextIO,
) -> int:
    total = 0.0
    for response in responses:
        for tool in response.tools:
            print(f"[tool] /{tool.name} {_parameters(tool)}  {tool.description}", file=output)
        for message in response.messages:
            print(f"[{message.role}] {message.content}", file=output)
        if response.HasField("reward"):
            total += response.reward
            print(f"[reward] {response.reward:g}", file=output)
        if response.terminated or response.truncated:
            numbers = " ".join(f"{name}={value:g}" for name, value in sorted(response.metrics.items()))
            how = "terminated" if response.terminated else "truncated"
            print(f"[{how}] total reward {total:g} {numbers}".rstrip(), file=output)
            return 0
        request = _next_action(source, output)
        if request is None:
            return 0
        requests.put(request)
    print("the server closed the stream without an answer", file=output)
    return 1


def _parameters(tool: pb.Tool) -> str:
    try:
        properties = json.loads(tool.parameters_json).get("properties", {})
    except (ValueError, AttributeError):
        return tool.parameters_json
    return " ".join(f"{name}={schema.get('type', '…')}" for name, schema in properties.items())


def _next_action(source: TextIO, output: TextIO) -> pb.InteractRequest | None:
    """The next action that is well written; None at /quit and at the end of the input."""
    while True:
        line = _line(source, output)
        if line is None or line.strip() == "/quit":
            return None
        if line.startswith("/malformed"):
            return act(malformed=[line.removeprefix("/malformed").strip() or "no JSON"])
        if not line.startswith("/"):
            return act(line)
        try:
            return act(tool_calls=[_call(number, text) for number, text in enumerate(line.split(" ;; "))])
        except ValueError as error:
            print(f'[?] {error}: write /NAME {{"argument": 1}} or /NAME argument=1', file=output)


def _line(source: TextIO, output: TextIO) -> str | None:
    lines: list[str] = []
    while True:
        print("> " if not lines else ". ", end="", file=output, flush=True)
        line = source.readline()
        if not line:
            print(file=output)
            return "\n".join(lines) if lines else None
        if not source.isatty():
            print(line.rstrip("\n"), file=output)
        lines.append(line.rstrip("\n").removesuffix("\\"))
        if not line.rstrip("\n").endswith("\\"):
            return "\n".join(lines)


def _call(number: int, text: str) -> ToolCall:
    name, _, rest = text.strip().removeprefix("/").partition(" ")
    rest = rest.strip()
    arguments: Any = {}
    if rest.startswith("{"):
        arguments = json.loads(rest)
    elif rest:
        for pair in rest.split():
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"{pair!r} is no argument")
            try:
                arguments[key] = json.loads(value)
            except ValueError:
                arguments[key] = value
    if not name or not isinstance(arguments, dict):
        raise ValueError("that is no call")
    return ToolCall(id=f"call_{number}", name=name, arguments_json=json.dumps(arguments))
