"""What a scripted engine answers: the script's keys, its faults, and the reply that follows from them. Pure."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

FAULTS = frozenset(
    {
        "ok",
        "400",
        "500",
        "503",
        "cut",  # the connection is cut before a byte of the reply
        "cut_body",  # the connection is cut in the middle of the reply
        "hang",  # no reply, ever
        "garbage",  # 200 whose body is no JSON
        "wrong_shape",  # 200 whose JSON lacks meta_info
        "short_logprobs",  # fewer logprobs than versions and completion_tokens
        "nan_logprobs",
        "wrong_spans",  # spans that do not cover the tokens
    }
)


@dataclasses.dataclass(frozen=True)
class Script:
    """How to answer. Seconds are real seconds."""

    tokens: str | list[list[int]] = "version"  # "version": each id is its version; "random"; or replies, taken in turn
    choices: list[int] = dataclasses.field(default_factory=lambda: list(range(3, 16)))  # ids that "random" draws from
    length: int | None = None  # tokens of a reply; None: max_new_tokens, which is also the limit
    end_with_stop: bool = False  # makes the last token the first of stop_token_ids, if there are any
    logprob: float = -1.0  # of every token
    delay_s: float = 0.0  # of a call
    delay_per_token_s: float = 0.0
    lognormal_mean_s: float = 0.0  # mean of a lognormal delay that is added; 0: none
    lognormal_sigma: float = 1.0
    faults: list[str] = dataclasses.field(default_factory=list)  # of the next calls, in order; used up
    fault: str = "500"  # happens with fault_rate
    fault_rate: float = 0.0  # share of calls, 0 to 1
    fault_after_delay: bool = False  # a fault strikes once the call's delay has passed, not at once
    kv_used_tokens: int = 0  # of 1,000,000, as /get_load tells
    draining: bool = False  # refuses calls with 503 and is not ready
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = {self.fault, *self.faults} - FAULTS
        if unknown:
            raise ValueError(f"unknown faults {sorted(unknown)}; known are {sorted(FAULTS)}")
        if isinstance(self.tokens, str) and self.tokens not in ("version", "random"):
            raise ValueError(f"tokens is {self.tokens!r}; it must be 'version', 'random' or a list of replies")


def make_reply(
    script: Script, body: dict[str, Any], ids: list[int], versions: list[int], *, extra_key: str, aborted: bool
) -> dict[str, Any]:
    """The 200 body of a call: `ids` sampled by `versions`, which may be longer, and as many logprobs."""
    spans: list[list[int]] = []
    for version in versions[: len(ids)]:
        if spans and spans[-1][0] == version:
            spans[-1][1] += 1
        else:
            spans.append([version, 1])
    sampling = body.get("sampling_params", {})
    if aborted:
        reason: dict[str, Any] = {"type": "abort", "message": "Aborted"}
    elif ids and ids[-1] in (sampling.get("stop_token_ids") or []) and not sampling.get("ignore_eos"):
        reason = {"type": "stop", "matched": ids[-1]}
    else:
        reason = {"type": "length", "length": len(ids)}
    return {
        "output_ids": ids,
        "meta_info": {
            "id": body.get("rid"),
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "output_token_logprobs": [[script.logprob, token, None] for token in ids],
            "policy_versions": spans,
            "extra_key": extra_key,
        },
    }


def spoil(reply: dict[str, Any], fault: str) -> dict[str, Any]:
    """The reply with the fault in it, where the fault is one of the body's content."""
    meta = reply["meta_info"]
    if fault == "wrong_shape":
        return {"output_ids": reply["output_ids"]}
    if fault == "short_logprobs":
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:-1]
    if fault == "nan_logprobs":
        meta["output_token_logprobs"] = [[math.nan, token, None] for _, token, _ in meta["output_token_logprobs"]]
    if fault == "wrong_spans":
        meta["policy_versions"] = [[version, length + 1] for version, length in meta["policy_versions"]]
    return reply
