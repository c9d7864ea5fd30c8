"""Whether an environment keeps its contract: a time step in, the response that says it out, or what is wrong with it.

Pure. Everything that an environment's author can get wrong is found here, at the source and by name, before it could
reach a gateway or a loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from headrace import images
from headrace.v1 import environment_service_pb2 as pb
from services.envs.environment import TimeStep

ROLES = frozenset({"system", "user", "tool", "assistant"})


class ContractError(Exception):
    """The environment returned what no time step can be; the message continues "reset" or "step"."""


def response(step: object, *, after_reset: bool, rewarded: bool, metric_names: Collection[str]) -> pb.InteractResponse:
    """The response that carries a time step.

    Args:
        step: what the environment returned.
        after_reset: whether it answers a reset, else an action.
        rewarded: whether an earlier step of the episode gave a reward.
        metric_names: names that the environment declares.

    Raises:
        ContractError: in one line, what is wrong.
    """
    if not isinstance(step, TimeStep):
        raise ContractError(f"returned {type(step).__name__}, not a TimeStep")
    try:
        _check_end(step, after_reset=after_reset, rewarded=rewarded)
        for name, value in step.metrics.items():
            if name not in metric_names:
                raise ContractError(f"gave the metric {name!r}, which metric_names does not list")
            _check_number(value, f"metric {name}")
        built = pb.InteractResponse(
            messages=step.messages,
            tools=step.tools,
            reward=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
            metrics=step.metrics,
        )
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ContractError(f"returned a field of the wrong type ({error})") from error
    for message in built.messages:
        if message.role not in ROLES:
            raise ContractError(f"returned a message with the role {message.role!r}")
        try:
            images.check(message)
        except images.ImageError as error:
            raise ContractError(f"returned images that cannot be sent: {error}") from error
    return built


def _check_end(step: TimeStep, *, after_reset: bool, rewarded: bool) -> None:
    if step.reward is not None:
        _check_number(step.reward, "reward")
    if step.terminated and step.truncated:
        raise ContractError("set both terminated and truncated")
    if after_reset and (step.ended or step.reward is not None):
        raise ContractError("ended the episode or gave a reward before there was an action")
    if not after_reset and step.tools:
        raise ContractError("gave tools, which belong to the reset")
    if not step.ended and not step.messages:
        raise ContractError("left the episode open without a message to answer")
    if step.ended and step.reward is None and not rewarded:
        raise ContractError("ended the episode, in which no reward was given")


def _check_number(value: object, what: str) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ContractError(f"gave the {what} {value!r}, not a finite number")
