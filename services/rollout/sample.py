"""One sampled action: what must hold of it before anything is made of it. Pure.

Arrays: A sampled tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection

from headrace.v1 import trajectory_pb2 as pb

_NEWEST_VERSION = 2**63 - 1  # as records hold it
_LEAST_LOGPROB = -1e30


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sampled action of A tokens."""

    token_ids: list[int]  # [A]
    logprobs: list[float]  # [A], nats
    version_spans: list[tuple[int, int]]  # (policy_version, length), the lengths sum to A
    finish_reason: pb.FinishReason


class BadReply(ValueError):
    """A reply that contradicts itself or the request."""


def checked(
    sample: Sample,
    *,
    max_new_tokens: int,
    min_policy_version: int,
    vocabulary_size: int,
    stop_token_ids: Collection[int],
) -> Sample:
    """The sample that an engine claims to have drawn, if it can be true of the request. Raises BadReply."""
    ids, logprobs, spans, reason = sample.token_ids, sample.logprobs, sample.version_spans, sample.finish_reason
    if len(ids) != len(logprobs):
        raise BadReply(f"there are {len(logprobs)} logprobs for {len(ids)} tokens")
    if len(ids) > max_new_tokens or (not ids and reason != pb.FINISH_REASON_ABORT):
        raise BadReply(f"{len(ids)} tokens where 1 to {max_new_tokens} were asked for")
    covered = 0
    for version, length in spans:
        if type(version) is not int or type(length) is not int or length < 1 or version > _NEWEST_VERSION:
            raise BadReply(f"policy_versions is {spans}")
        if version < min_policy_version:
            raise BadReply(f"policy_versions {spans} are older than {min_policy_version}")
        covered += length
    if covered != len(ids):
        raise BadReply(f"policy_versions covers {covered} of {len(ids)} tokens")
    if not ids:
        return sample
    # Loops in C: an action may have thousands of tokens.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary_size:
        raise BadReply(f"output_ids holds what is no token of 0..{vocabulary_size - 1}")
    # JSON's integers have no end, and those that are no floats are found by the comparisons.
    if (
        not set(map(type, logprobs)) <= {float, int}
        or not (min(logprobs) >= _LEAST_LOGPROB and max(logprobs) <= 1e-3)
        or not all(map(math.isfinite, logprobs))
    ):
        raise BadReply("output_token_logprobs holds what is no log-probability")
    if reason == pb.FINISH_REASON_ABORT and ids[-1] in stop_token_ids:
        # The abort came with the last token: nothing is left to sample.
        return dataclasses.replace(sample, finish_reason=pb.FINISH_REASON_STOP)
    return sample


def joined(parts: list[Sample], finish_reason: pb.FinishReason) -> Sample:
    """The action that several calls sampled piece by piece."""
    if len(parts) == 1 and parts[0].finish_reason == finish_reason:
        return parts[0]
    spans: list[tuple[int, int]] = []
    for version, length in itertools.chain.from_iterable(part.version_spans for part in parts):
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + length)
        else:
            spans.append((version, length))
    return Sample(
        [token for part in parts for token in part.token_ids],
        [logprob for part in parts for logprob in part.logprobs],
        spans,
        finish_reason,
    )
