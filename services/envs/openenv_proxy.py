"""Any OpenEnv server's environment, over its WebSocket: one connection is one episode.

    sent      {"type": "reset", "data": {"seed": …}}   {"type": "step", "data": action}   {"type": "close"}
    received  {"type": "observation", "data": {"observation": {…}, "reward": number or null, "done": bool}}
              {"type": "error", "data": {"message": …, "code": …}}

A reply of the policy becomes the one text field of an action, or is an action itself, in JSON. What the server's schema
refuses is answered, for that is the policy's fault; any other error, silence or a closed connection costs the episode.
OpenEnv knows no truncation: `done` is termination, unless an observation or its metadata has a true "truncated".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI, WebSocketException

from services.envs import marked_answer
from services.envs.environment import Action, Environment, Task, TimeStep, task_random, user

ActionType = Literal["text", "integer", "number"]

MAX_MESSAGE_BYTES = 64 << 20
# Error codes for an action that the policy made wrong.
REFUSED_ACTION = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
AT_CAPACITY = "CAPACITY_REACHED"

_OUTSIDE = ("done", "reward", "truncated", "metadata")  # parts of an observation that are not the policy's
_PAUSE_S = 0.5


class ProtocolError(Exception):
    """The server is gone, silent, or says what OpenEnv's protocol does not."""


class RefusedAction(Exception):
    """The policy's reply makes no action; the message is for it."""


class OpenEnv(Environment):
    """Play the environment of an OpenEnv server."""

    metric_names = ("steps", "refused_actions")

    def __init__(
        self,
        *,
        url: str,
        action_field: str = "",
        action_type: ActionType = "text",
        observation_field: str = "",
        instructions: str = "",
        reset: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
    ):
        """Raises ValueError.

        Args:
            url: of the WebSocket, such as ws://host:8000/ws.
            action_field: field of an action that takes the reply; empty: the reply is an action in JSON.
            action_type: what that field holds; of a number, the last in the reply.
            observation_field: what the policy sees of an observation; empty: all, as text if it is one text, else JSON.
            instructions: for the policy, before the first observation.
            reset: data of the reset, beside the task's seed.
            timeout_s: for one answer of the server; and how long to wait for a place on a full one.
        """
        if not url.startswith(("ws://", "wss://")) or action_type not in get_args(ActionType) or timeout_s <= 0:
            raise ValueError(
                f"url must begin with ws, action_type be one of {get_args(ActionType)}, timeout_s positive"
            )
        self._url = url
        self._action_field, self._action_type = action_field, action_type
        self._observation_field = observation_field
        self._instructions = instructions
        self._reset = dict(reset or {})
        self._timeout_s = timeout_s
        self._connection: ClientConnection | None = None
        self._steps = 0
        self._refused = 0

    async def reset(self, task: Task) -> TimeStep:
        data = {**self._reset, "seed": task_random(task).getrandbits(31)}
        async with asyncio.timeout(self._timeout_s):
            received = await self._first(data)
        step = self._time_step(received)
        if step.ended:
            raise ProtocolError("the episode had ended with its reset")
        text = "\n\n".join(part for part in (self._instructions, step.messages[0].content) if part)
        return TimeStep([user(text)])

    async def step(self, action: Action) -> TimeStep:
        try:
            received = await self._ask({"type": "step", "data": self._action(action.message.content)})
        except RefusedAction as refused:
            self._refused += 1
            metrics = {"steps": self._steps, "refused_actions": self._refused}
            return TimeStep([user(f"That is no action: {refused}")], metrics=metrics)
        self._steps += 1
        return self._time_step(received)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _first(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a reset, on a new connection; a full server is asked again."""
        while True:
            try:
                # A server that computes in its event loop answers no ping: our own deadlines find a dead one.
                self._connection = await connect(self._url, max_size=MAX_MESSAGE_BYTES, ping_interval=None, proxy=None)
                return await self._ask({"type": "reset", "data": data})
            except (OSError, InvalidHandshake, InvalidURI) as error:
                raise ProtocolError(f"{self._url} cannot be reached: {error}") from error
            except RefusedAction as error:
                raise ProtocolError(f"{self._url} refuses the reset {data}: {error}") from error
            except _Full:
                await self.close()
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data of the observation. Raises RefusedAction, ProtocolError and _Full."""
        assert self._connection is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(ConnectionClosed):  # a full server says so and closes before it is asked
                    await self._connection.send(json.dumps(message))
                received = json.loads(await self._connection.recv())
            kind, data = received["type"], received["data"]
            if kind == "error":
                raise _error(data)
            if kind != "observation" or not isinstance(data.get("observation"), Mapping):
                raise ProtocolError(f"{self._url} answered {kind!r}, not an observation")
        except WebSocketException as error:
            raise ProtocolError(f"{self._url} closed the connection: {error}") from error
        except TimeoutError:
            raise ProtocolError(f"{self._url} gave no answer within {self._timeout_s:g} s") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"{self._url} answered what is no message of the protocol") from error
        return dict(data)

    def _action(self, text: str) -> Mapping[str, Any]:
        """Raises RefusedAction."""
        if self._action_field:
            return {self._action_field: text.strip() if self._action_type == "text" else self._number(text)}
        try:
            action = json.loads(marked_answer.in_fence(text))
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise RefusedAction("reply with a JSON object, or with one in a code fence.")
        return action

    def _number(self, text: str) -> float:
        if self._action_type == "integer":
            found = re.findall(r"-?[0-9]+", text)
            if found:
                return int(found[-1][:18])
        else:
            found = re.findall(r"-?[0-9]+(?:\.[0-9]+)?", text)
            if found:
                return float(found[-1][:18])
        raise RefusedAction(f"reply with {'a whole' if self._action_type == 'integer' else 'a'} number.")

    def _time_step(self, data: Mapping[str, Any]) -> TimeStep:
        observation, reward = data["observation"], data.get("reward")
        places = (data, observation, data.get("metadata"), observation.get("metadata"))
        truncated = any(isinstance(place, Mapping) and bool(place.get("truncated")) for place in places)
        done = bool(data.get("done"))
        return TimeStep(
            [user(self._shown(observation))],
            reward=None if reward is None else float(reward),
            terminated=done and not truncated,
            truncated=done and truncated,
            metrics={"steps": self._steps, "refused_actions": self._refused},
        )

    def _shown(self, observation: Mapping[str, Any]) -> str:
        seen = {name: value for name, value in observation.items() if name not in _OUTSIDE}
        if self._observation_field:
            if self._observation_field not in seen:
                raise ProtocolError(f"the observation has no {self._observation_field!r}, but {sorted(seen)}")
            seen = {self._observation_field: seen[self._observation_field]}
        values = list(seen.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(seen, ensure_ascii=False)


class _Full(Exception):
    """The server has no place for another episode."""


def _error(data: Mapping[str, Any]) -> Exception:
    message, code = data["message"], data.get("code")
    if code in REFUSED_ACTION:
        wrong = [f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}" for error in data.get("errors", ())]
        return RefusedAction("; ".join(wrong) or message)
    return _Full(message) if code == AT_CAPACITY else ProtocolError(f"the server says {code}: {message}")
