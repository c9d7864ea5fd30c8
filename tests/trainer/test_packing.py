"""Trajectories of a few tokens, and the rows that they must end up in."""

import numpy as np
import pytest

from services.trainer.packing import Sample, pack, placed, row_buckets


def sample(name: str, length: int, *, first: int = 0, advantage: float = 0.0) -> Sample:
    """A trajectory whose tokens count up from `first`; everything after its first token was sampled."""
    mask = np.arange(length) > 0
    return Sample(
        trajectory_id=name,
        token_ids=np.arange(first, first + length, dtype=np.int32),
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5, np.nan).astype(np.float32),
        versions=np.zeros(length, np.int64),
        advantage=advantage,
    )


def test_packs_by_hand():
    samples = [
        sample("a", 2, first=1, advantage=1.0),
        sample("b", 4, first=10, advantage=2.0),
        sample("c", 3, first=20),
    ]
    (microbatch,) = pack(samples, max_row_tokens=6, buckets=(1, 2, 4))
    assert microbatch.tokens_BT.tolist() == [[10, 11, 12, 13, 1, 2], [20, 21, 22, 0, 0, 0]]
    assert microbatch.positions_BT.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert microbatch.segment_ids_BT.tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]
    assert microbatch.action_mask_BT.astype(int).tolist() == [[0, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]
    assert microbatch.advantages_BT.tolist() == [[0, 2, 2, 2, 0, 1], [0, 0, 0, 0, 0, 0]]
    assert (microbatch.behaviour_logprobs_BT[microbatch.action_mask_BT] == -0.5).all()
    assert microbatch.action_tokens == 6
    assert microbatch.tokens == 9


def test_dtypes_are_those_that_the_step_is_compiled_for():
    (microbatch,) = pack([sample("a", 2)], max_row_tokens=4, buckets=(1,))
    kinds = {name: value.dtype.name for name, value in vars(microbatch).items()}
    assert kinds == {
        "tokens_BT": "int32",
        "positions_BT": "int32",
        "segment_ids_BT": "int32",
        "action_mask_BT": "bool",
        "behaviour_logprobs_BT": "float32",
        "advantages_BT": "float32",
        "ages_BT": "float32",
        "values_BT": "float32",
        "returns_BT": "float32",
    }


def test_tells_where_each_sample_came_to_lie():
    samples = [sample(str(number), 2 + number % 4) for number in range(9)]
    found = {}
    for microbatch, places in placed(samples, max_row_tokens=6, buckets=(1, 2)):
        for number, row, start in places:
            found[number] = microbatch.tokens_BT[row, start : start + len(samples[number].token_ids)]
    assert sorted(found) == list(range(9))
    for number, tokens in found.items():
        np.testing.assert_array_equal(tokens, samples[number].token_ids)


def test_fills_large_microbatches_and_gives_the_rest_the_smallest_bucket():
    samples = [sample(str(number), 5) for number in range(7)]
    shapes = [m.tokens_BT.shape for m in pack(samples, max_row_tokens=5, buckets=(1, 2, 4))]
    assert shapes == [(4, 5), (4, 5)]
    shapes = [m.tokens_BT.shape for m in pack(samples[:5], max_row_tokens=5, buckets=(1, 2, 4))]
    assert shapes == [(4, 5), (1, 5)]


def test_no_samples_give_no_microbatches():
    assert pack([], max_row_tokens=5, buckets=(1,)) == []


def test_keeps_every_token_of_random_trajectories_once():
    lengths = np.random.default_rng(0).integers(1, 33, 200)
    samples = [sample(str(number), int(length), first=100 * number) for number, length in enumerate(lengths)]
    microbatches = pack(samples, max_row_tokens=32, buckets=row_buckets(256, 32))
    found = [
        microbatch.tokens_BT[row][microbatch.segment_ids_BT[row] == segment].tolist()
        for microbatch in microbatches
        for row in range(len(microbatch.tokens_BT))
        for segment in range(1, microbatch.segment_ids_BT[row].max() + 1)
    ]
    assert sorted(found) == sorted(one.token_ids.tolist() for one in samples)
    assert all(microbatch.tokens_BT.size <= 256 for microbatch in microbatches)


def test_buckets_are_few_and_divide_over_the_devices():
    assert row_buckets(2048, 64) == (1, 2, 4, 8, 16, 32)
    assert row_buckets(700, 64) == (1, 2, 4, 8, 10)
    assert row_buckets(2048, 64, multiple_of=8) == (8, 16, 32)
    with pytest.raises(ValueError, match=r"trainer\.microbatch_tokens is 256, must be at least 512"):
        row_buckets(256, 64, multiple_of=8)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (sample("long", 9), "long has 9 tokens, a row has 1 to 8"),
        (sample("empty", 0), "empty has 0 tokens"),
        (Sample("first", np.ones(2), np.ones(2, bool), np.zeros(2), np.zeros(2)), "first samples its first token"),
        (Sample("ragged", np.ones(3), np.zeros(2, bool), np.zeros(3), np.zeros(3)), "ragged has 3 tokens, but 2 mask"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(broken: Sample, message: str):
    with pytest.raises(ValueError, match=message):
        pack([broken], max_row_tokens=8, buckets=(1,))
