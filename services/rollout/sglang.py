"""The dialect of our own engine, SGLang's HTTP API with versions: POST /generate.

It tells the version of each token itself, and holds a call until its weights are new enough.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from yarl import URL

from headrace.v1 import trajectory_pb2 as pb
from services.rollout.dialect import Call, Http, HttpError, Reply
from services.rollout.sample import BadReply, Sample, checked
from services.rollout.window import Load

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


class Sglang:
    """See `Dialect`."""

    async def look(self, http: Http, root: URL) -> Load | None:
        await http.get(root / "ready")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            try:
                load = json.loads(await http.get(root / "get_load"))
            except HttpError as error:
                if error.status == 401:
                    raise
                return None
            return Load(
                policy_version=load["policy_version"],
                running=load["running"],
                waiting=load["waiting"],
                kv_used=load["kv_used_tokens"] / max(1, load["kv_capacity_tokens"]),
                retracted=load.get("retracted", 0),
            )
        return None

    async def generate(self, http: Http, root: URL, call: Call) -> Reply:
        return read_reply(await http.post(root / "generate", request_body(call)), call)

    async def abort(self, http: Http, root: URL, rid: str) -> None:
        await http.post(root / "abort_request", json.dumps({"rid": rid}).encode())


def request_body(call: Call) -> bytes:
    """Put together by hand: an episode's tokens are formatted once, not once a turn."""
    space = f',"extra_key":{json.dumps(call.space)}' if call.space else ""
    text = (
        f'{{"input_ids":[{call.tokens}],"sampling_params":{{"max_new_tokens":{call.max_new_tokens},'
        f'"temperature":{json.dumps(call.temperature)},"stop_token_ids":{json.dumps(list(call.stop_token_ids))}}}'
        f',"return_logprob":true,"min_policy_version":{call.min_policy_version},"rid":{json.dumps(call.rid)}{space}}}'
    )
    return text.encode()


def read_reply(data: bytes, call: Call) -> Reply:
    """What a 200 body of /generate says. Raises BadReply."""
    try:
        reply: Any = json.loads(data)
        ids = reply["output_ids"]
        meta = reply["meta_info"]
        entries = meta["output_token_logprobs"]
        spans = [(version, length) for version, length in meta["policy_versions"]]
        reason = _FINISH_REASONS[meta["finish_reason"]["type"]]
        logprobs = [entry[0] for entry in entries]
        logprob_ids = [entry[1] for entry in entries]
        count = meta["completion_tokens"]
        space = meta["extra_key"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise BadReply(f"{type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(ids, list):
        raise BadReply(f"output_ids is of type {type(ids).__name__}")
    if ids != logprob_ids:
        raise BadReply(f"output_ids ({len(ids)}) and output_token_logprobs ({len(logprob_ids)}) name different tokens")
    if len(ids) != count:
        raise BadReply(f"completion_tokens is {count} for {len(ids)} tokens")
    if not isinstance(space, str):
        raise BadReply(f"extra_key is {space!r}")
    sample = checked(
        Sample(ids, logprobs, spans, reason),
        max_new_tokens=call.max_new_tokens,
        min_policy_version=call.min_policy_version,
        vocabulary_size=call.vocabulary_size,
        stop_token_ids=call.stop_token_ids,
    )
    return Reply(sample, space)
