"""What POST /generate may carry, checked. Pure: bytes in, a request out, or the reason why not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import orjson

_LARGEST_SEED = 2**31 - 1


class BadRequest(ValueError):
    """A request that can never be answered; the message says what is wrong with it."""


class Limits(Protocol):
    """What the engine can take."""

    vocabulary_size: int
    longest_prompt: int  # tokens
    longest_request: int  # tokens, prompt and reply


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to sample. `space`: the namespace of the prefix cache, None in a first turn."""

    rid: str | None
    input_ids: list[int]
    max_new_tokens: int
    temperature: float
    stop_token_ids: list[int]
    ignore_eos: bool
    sampling_seed: int | None
    space: str | None
    min_policy_version: int | None


def parse(data: bytes, limits: Limits) -> Request:
    """The request in a body of JSON. Raises BadRequest."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    sampling = body.get("sampling_params", {})
    if not isinstance(sampling, dict):
        raise BadRequest("sampling_params must be an object")
    known = {"max_new_tokens", "temperature", "stop_token_ids", "ignore_eos", "sampling_seed"}
    if unknown := sampling.keys() - known:
        # top_p and the like would make the logprobs those of another distribution than the one sampled from.
        raise BadRequest(f"sampling_params has {sorted(unknown)}; known are {sorted(known)}")
    input_ids = _tokens(body.get("input_ids"), "input_ids", limits.vocabulary_size)
    if not input_ids:
        raise BadRequest("input_ids is empty")
    max_new_tokens = _whole(sampling, "max_new_tokens", smallest=1, default=128)
    if len(input_ids) > limits.longest_prompt:
        raise BadRequest(f"the input has {len(input_ids)} tokens; the engine takes at most {limits.longest_prompt}")
    if len(input_ids) + max_new_tokens > limits.longest_request:
        raise BadRequest(
            f"input ({len(input_ids)} tokens) and max_new_tokens ({max_new_tokens}) together pass the engine's"
            f" {limits.longest_request} tokens"
        )
    temperature = sampling.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise BadRequest(f"temperature is {temperature!r}; it must be a number from 0 on")
    for key, kind in (("rid", str), ("extra_key", str), ("return_logprob", bool)):
        if not isinstance(body.get(key), kind | None):
            raise BadRequest(f"{key} must be of type {kind.__name__}")
    if not isinstance(sampling.get("ignore_eos", False), bool):
        raise BadRequest("ignore_eos must be true or false")
    return Request(
        rid=body.get("rid"),
        input_ids=input_ids,
        max_new_tokens=max_new_tokens,
        temperature=float(temperature),
        stop_token_ids=_tokens(sampling.get("stop_token_ids") or [], "stop_token_ids", limits.vocabulary_size),
        ignore_eos=sampling.get("ignore_eos", False),
        sampling_seed=_whole(sampling, "sampling_seed", smallest=0, largest=_LARGEST_SEED),
        space=body.get("extra_key"),
        min_policy_version=_whole(body, "min_policy_version", smallest=0),
    )


def _tokens(value: Any, name: str, vocabulary_size: int) -> list[int]:
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise BadRequest(f"{name} must be a list of token ids")
    if value and (min(value) < 0 or max(value) >= vocabulary_size):
        raise BadRequest(f"{name} holds ids outside 0..{vocabulary_size - 1}")
    return value


def _whole(values: dict[str, Any], name: str, *, smallest: int, largest: float = math.inf, default: Any = None) -> Any:
    value = values.get(name, default)
    if value is None:
        return None
    if type(value) is not int or not smallest <= value <= largest:
        raise BadRequest(f"{name} is {value!r}; it must be a whole number from {smallest} on")
    return value
