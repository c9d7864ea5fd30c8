"""The dialect of a vLLM server: POST /v1/completions with token ids in and out. As documented for vLLM 0.32.

vLLM does not tell which weights drew a token. It tells which it holds: GET /weight_info has the name that the puller
(services/inference/vllm.py) gave with the last finished update, "RUN/VERSION". It is asked before and after each call.

    same before and after    every token was drawn by that version: names only ever change to newer ones
    different                an update came in between, and vLLM does not say where. All tokens get the OLDER version:
                             they count as stale as they may be, and no loss but the age rules reads the label, since
                             logprobs are the sampler's own. Counted in headrace_rollout_undated_tokens.

A call is not sent before the server has the version that it demands, since vLLM would not wait. An update with
`inference.update: recompute` aborts what runs, so that no call's tokens ever come from two versions.

vLLM aborts a request whose client has gone. Requires VLLM_SERVER_DEV_MODE=1 and, for temperatures other than 1,
--logprobs-mode processed_logprobs: docs/vllm.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import aiohttp
from yarl import URL

from headrace.v1 import trajectory_pb2 as pb
from services.rollout import metrics
from services.rollout.dialect import Call, Http, HttpError, Reply
from services.rollout.sample import BadReply, Sample, checked
from services.rollout.window import Load

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}
_GAUGES = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)"
    rb"(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.02, 0.5  # between looks for a version that a call waits for


class Vllm:
    """See `Dialect`. `run_id`: a server with another run's weights is not used."""

    def __init__(self, run_id: str):
        self._prefix = f"{run_id}/"

    async def look(self, http: Http, root: URL) -> Load | None:
        await http.get(root / "health")
        version = await self._version(http, root)
        if version is None:
            raise HttpError(503, "it holds no weights of this run")
        sums = dict.fromkeys((b"num_requests_running", b"num_requests_waiting", b"num_preemptions_total"), 0.0)
        fullest = 0.0
        for name, value in _GAUGES.findall(await http.get(root / "metrics")):  # a line for each data-parallel rank
            if name in sums:
                sums[name] += float(value)
            else:
                fullest = max(fullest, float(value))
        running, waiting, preempted = map(int, sums.values())
        return Load(version, running, waiting, fullest, preempted)

    async def generate(self, http: Http, root: URL, call: Call) -> Reply:
        before = await self._wait_for_version(http, root, call.min_policy_version)
        space = call.space or str(before)
        data = await http.post(root / "v1/completions", request_body(call, space))
        after = None
        with contextlib.suppress(HttpError, aiohttp.ClientError, OSError):  # a server that has gone tells no more
            after = await self._version(http, root)
        reply = read_reply(data, call, before, space)
        if after != before:
            metrics.undated_tokens.inc(len(reply.sample.token_ids))
        return reply

    async def abort(self, http: Http, root: URL, rid: str) -> None:
        pass  # the connection's end tells it

    async def _version(self, http: Http, root: URL) -> int | None:
        """The version of this run that the server holds."""
        try:
            name = json.loads(await http.get(root / "weight_info"))["weight_version"]
            return int(name.removeprefix(self._prefix)) if name.startswith(self._prefix) else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    async def _wait_for_version(self, http: Http, root: URL, at_least: int) -> int:
        delay_s = _FIRST_DELAY_S
        while True:
            version = await self._version(http, root)
            if version is None:
                raise HttpError(503, "it holds no weights of this run")
            if version >= at_least:
                return version
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


def request_body(call: Call, space: str) -> bytes:
    """Names every knob that would change the distribution: a server's defaults are its model folder's."""
    text = (
        f'{{"prompt":[{call.tokens}],"max_tokens":{call.max_new_tokens},"temperature":{json.dumps(call.temperature)}'
        ',"top_p":1,"top_k":0,"min_p":0,"repetition_penalty":1,"presence_penalty":0,"frequency_penalty":0'
        f',"stop_token_ids":{json.dumps(list(call.stop_token_ids))},"logprobs":1,"return_token_ids":true'
        ',"return_tokens_as_token_ids":true,"skip_special_tokens":false,"add_special_tokens":false'
        f',"cache_salt":{json.dumps(space)},"request_id":{json.dumps(call.rid)}}}'
    )
    return text.encode()


def read_reply(data: bytes, call: Call, version: int, space: str) -> Reply:
    """What a 200 body says, its tokens drawn by `version`. Raises BadReply."""
    try:
        reply: Any = json.loads(data)
        (choice,) = reply["choices"]
        ids = choice["token_ids"] or []
        reason = _FINISH_REASONS[choice["finish_reason"]]
        logprobs = choice["logprobs"]["token_logprobs"] if ids else []
        names = choice["logprobs"]["tokens"] if ids else []
        prompt_tokens = reply["usage"]["prompt_tokens"]
        named = [f"token_id:{token}" for token in ids]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise BadReply(f"{type(error).__name__}: {str(error)[:200]}") from error
    if names != named:
        raise BadReply(f"token_ids ({len(named)}) and logprobs.tokens ({len(names)}) name different tokens")
    if prompt_tokens != call.tokens.count(",") + 1:
        raise BadReply(f"the server counts {prompt_tokens} prompt tokens, {call.tokens.count(',') + 1} were sent")
    sample = checked(
        Sample(ids, logprobs, [(version, len(ids))] if ids else [], reason),
        max_new_tokens=call.max_new_tokens,
        min_policy_version=call.min_policy_version,
        vocabulary_size=call.vocabulary_size,
        stop_token_ids=call.stop_token_ids,
    )
    return Reply(sample, space)
