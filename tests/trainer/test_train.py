"""The train step: against NumPy, and that nothing but the trajectories themselves decides its result."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest

from headrace import config
from services.trainer import sharding
from services.trainer.model import decoder, huggingface
from services.trainer.model.config import DecoderConfig
from services.trainer.model.decoder import Parameters
from services.trainer.packing import Microbatch, Sample, pack
from services.trainer.train import Learner, Sums, TrainState, merge
from tests import numpy_decoder

# One layer compiles in half the time of two.
QWEN3 = replace(numpy_decoder.QWEN3, num_hidden_layers=1)
ROW_TOKENS = 12
MESH = sharding.create_mesh()


def learner(
    decoder_config: DecoderConfig = QWEN3,
    *,
    optimizer: config.Optimizer | None = None,
    loss: config.Loss | None = None,
    steps: int = 10,
    **options: object,
) -> Learner:
    return Learner(
        decoder_config,
        MESH,
        optimizer=optimizer or config.Optimizer(learning_rate=0.01),
        loss=loss or config.Loss(),
        steps=steps,
        **options,
    )


def samples(
    count: int, *, vocab_size: int = QWEN3.vocab_size, shortest: int = 6, longest: int = 12, seed: int = 0
) -> list[Sample]:
    """Trajectories with two actions each, their masked logprobs NaN."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(rng.integers(shortest, longest + 1))
        mask = np.zeros(length, bool)
        mask[2:4] = mask[5:] = True
        made.append(
            Sample(
                trajectory_id=f"trajectory-{number}",
                token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
                action_mask=mask,
                behaviour_logprobs=np.where(mask, rng.normal(-3, 0.3, length), np.nan).astype(np.float32),
                versions=np.zeros(length, np.int64),
                advantage=float(rng.normal()),
            )
        )
    return made


def packed(chosen: Sequence[Sample], rows: int) -> list[Microbatch]:
    return pack(chosen, max_row_tokens=ROW_TOKENS, buckets=(rows,))


def accumulated(taught: Learner, parameters: Parameters, microbatches: Sequence[Microbatch]) -> Sums:
    sums = taught.zeros()
    for microbatch in microbatches:
        sums = taught.accumulate(parameters, sums, microbatch)
    return sums


def mean_gradients(sums: Sums) -> dict[str, np.ndarray]:
    return {name: np.array(total) / float(sums.metrics.tokens) for name, total in sums.gradients.items()}


def assert_same(left: Parameters, right: Parameters) -> None:
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.fixture(scope="module")
def taught() -> Learner:
    return learner()


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    return decoder.initial_parameters(QWEN3, 0, MESH)


def test_the_number_of_microbatches_does_not_change_the_gradient(taught: Learner, parameters: Parameters):
    # No two fit into one row of 12 tokens, so 8 rows: 8 microbatches of 1, 4 of 2, 2 of 4, 1 of 8.
    chosen = samples(8, shortest=7)
    whole = {}
    for rows in (1, 2, 4, 8):
        microbatches = packed(chosen, rows)
        sums = accumulated(taught, parameters, microbatches)
        whole[rows] = (len(microbatches), mean_gradients(sums), sums.metrics.summary())
    assert [whole[rows][0] for rows in (1, 2, 4, 8)] == [8, 4, 2, 1]
    _, expected, metrics = whole[8]
    assert max(np.abs(value).max() for value in expected.values()) > 0.01
    for rows in (1, 2, 4):
        for name, value in whole[rows][1].items():
            np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)
        assert whole[rows][2] == pytest.approx(metrics, rel=1e-4)


def test_one_gradient_for_trajectories_of_very_different_lengths(taught: Learner, parameters: Parameters):
    """A mean of means would weigh the short one's tokens more."""
    (short,), (long,) = samples(1, longest=6), samples(1, shortest=12, seed=1)
    apart = mean_gradients(accumulated(taught, parameters, [*packed([short], 1), *packed([long], 1)]))
    together = mean_gradients(accumulated(taught, parameters, packed([short, long], 2)))
    for name, value in together.items():
        np.testing.assert_allclose(apart[name], value, atol=1e-5, err_msg=name)


def test_padding_changes_nothing_bit_for_bit(taught: Learner, parameters: Parameters):
    (plain,) = packed(samples(3), 4)
    padding = plain.segment_ids_BT == 0
    assert padding.all(axis=1).any()
    assert padding[:2].any()
    noise = np.random.default_rng(1)
    filled = replace(
        plain,
        tokens_BT=np.where(padding, noise.integers(0, QWEN3.vocab_size, padding.shape), plain.tokens_BT).astype("i4"),
        positions_BT=np.where(padding, 5, plain.positions_BT).astype("i4"),
        behaviour_logprobs_BT=np.where(padding, np.nan, plain.behaviour_logprobs_BT).astype("f4"),
    )
    expected, found = (accumulated(taught, parameters, [microbatch]) for microbatch in (plain, filled))
    assert_same(expected.gradients, found.gradients)
    assert expected.metrics.summary() == found.metrics.summary()


def test_a_larger_bucket_changes_nothing_but_rounding(taught: Learner, parameters: Parameters):
    """Another shape is another program, which may add in another order; within a shape, see above, bits are equal."""
    fewer, more = (accumulated(taught, parameters, packed(samples(4), rows)) for rows in (4, 8))
    for name, value in mean_gradients(fewer).items():
        np.testing.assert_allclose(mean_gradients(more)[name], value, atol=1e-6, err_msg=name)
    assert fewer.metrics.summary() == pytest.approx(more.metrics.summary(), rel=1e-5)


def test_neighbours_in_a_row_do_not_meet(taught: Learner, parameters: Parameters):
    one, two, three = samples(3, shortest=4, longest=4, seed=3)

    def scores(order: Sequence[Sample]) -> dict[str, np.ndarray]:
        (microbatch,) = packed(order, 1)
        values = np.array(taught.logprobs(parameters, microbatch))
        assert microbatch.segment_ids_BT.max() == len(order)
        found = {}
        for segment in range(1, len(order) + 1):
            at = microbatch.segment_ids_BT == segment
            tokens = microbatch.tokens_BT[at].tolist()
            (name,) = (sample.trajectory_id for sample in order if sample.token_ids.tolist() == tokens)
            found[name] = values[at][1:]
        return found

    alone = {name: value for sample in (one, two, three) for name, value in scores([sample]).items()}
    for order in ([one, two, three], [three, one, two], [two, three, one], [two, one]):
        for name, value in scores(order).items():
            np.testing.assert_allclose(value, alone[name], atol=1e-6)


def test_masked_neighbours_have_no_gradient(taught: Learner, parameters: Parameters):
    """What stands beside a trajectory in its row changes neither its loss nor its gradient."""
    one, two, three = samples(3, longest=6, seed=4)
    silent = [replace(sample, action_mask=np.zeros(len(sample.token_ids), bool)) for sample in (two, three)]
    beside = [packed([one, other], 1) for other in silent]
    left, right = (mean_gradients(accumulated(taught, parameters, microbatches)) for microbatches in beside)
    for name, value in left.items():
        np.testing.assert_allclose(right[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("poison", [np.nan, -np.inf, np.inf])
def test_masked_poison_never_reaches_the_gradient(taught: Learner, parameters: Parameters, poison: float):
    clean, poisoned = (
        [
            replace(sample, behaviour_logprobs=np.where(sample.action_mask, sample.behaviour_logprobs, value))
            for sample in samples(3)
        ]
        for value in (0.0, poison)
    )
    expected, found = (accumulated(taught, parameters, packed(chosen, 4)) for chosen in (clean, poisoned))
    assert_same(expected.gradients, found.gradients)
    assert np.isfinite(float(found.metrics.loss))


def test_a_ratio_of_e_to_the_50_makes_a_finite_update(taught: Learner, parameters: Parameters):
    extreme = [replace(sample, behaviour_logprobs=sample.behaviour_logprobs - np.float32(50)) for sample in samples(4)]
    sums = accumulated(taught, parameters, packed(extreme, 4))
    assert np.isfinite(list(sums.metrics.summary().values())).all()
    state, update = taught.apply(taught.initial_state(parameters), sums)
    assert not update.skipped
    assert all(np.isfinite(value).all() for value in state.parameters.values())


def unchanged_by(taught: Learner, parameters: Parameters, chosen: Sequence[Sample]) -> TrainState:
    before = taught.initial_state(parameters)
    kept = jax.device_get(before)
    state, update = taught.apply(before, accumulated(taught, parameters, packed(chosen, 4)))
    assert bool(update.skipped)
    assert (int(state.updates), int(state.skipped)) == (0, 1)
    assert_same(kept.parameters, state.parameters)
    for old, new in zip(jax.tree.leaves(kept.optimizer), jax.tree.leaves(state.optimizer), strict=True):
        np.testing.assert_array_equal(old, new)
    return state


def test_a_batch_without_actions_makes_no_update(taught: Learner, parameters: Parameters):
    unchanged_by(
        taught, parameters, [replace(sample, action_mask=np.zeros_like(sample.action_mask)) for sample in samples(2)]
    )


@pytest.mark.parametrize("field", ["behaviour_logprobs", "advantage"])
def test_a_loss_that_is_not_finite_makes_no_update_and_training_goes_on(
    taught: Learner, parameters: Parameters, field: str
):
    broken = {
        "behaviour_logprobs": lambda sample: np.full(len(sample.token_ids), np.nan, np.float32),
        "advantage": lambda sample: float("nan"),
    }[field]
    good, bad = samples(2)
    state = unchanged_by(taught, parameters, [good, replace(bad, **{field: broken(bad)})])
    state, update = taught.apply(state, accumulated(taught, state.parameters, packed([good], 4)))
    assert not update.skipped
    assert (int(state.updates), int(state.skipped)) == (1, 1)
    assert not np.array_equal(state.parameters["model.norm.weight"], parameters["model.norm.weight"])


def test_parameters_outlive_the_updates_made_from_them(taught: Learner, parameters: Parameters):
    kept = jax.device_get(parameters)
    state = taught.initial_state(parameters)
    published = dict(huggingface.to_huggingface(state.parameters))
    for _ in range(2):
        state, _ = taught.apply(state, accumulated(taught, state.parameters, packed(samples(2), 4)))
    assert_same(kept, parameters)
    assert_same(kept, published)
    assert not np.array_equal(state.parameters["model.norm.weight"], kept["model.norm.weight"])


def test_supervision_is_the_policy_gradient_of_advantage_one(taught: Learner, parameters: Parameters):
    """On-policy with advantage 1, the gradient of -A pi / mu is that of -log pi."""
    (microbatch,) = packed(samples(4), 4)
    scores = np.array(taught.logprobs(parameters, microbatch))
    on_policy = replace(
        microbatch, behaviour_logprobs_BT=scores, advantages_BT=microbatch.action_mask_BT.astype(np.float32)
    )
    expected = taught.accumulate(parameters, taught.zeros(), on_policy)
    found = taught.accumulate_supervised(parameters, taught.zeros(), microbatch)
    for name, value in mean_gradients(expected).items():
        np.testing.assert_allclose(mean_gradients(found)[name], value, atol=1e-6, err_msg=name)
    assert float(found.metrics.loss) == pytest.approx(-scores[microbatch.action_mask_BT].sum(), rel=1e-5)


def test_supervision_learns_demonstrations_by_heart(taught: Learner, parameters: Parameters):
    state = taught.initial_state(parameters)
    microbatches = packed(samples(4), 4)
    losses = []
    for _ in range(60):
        sums = taught.zeros()
        for microbatch in microbatches:
            sums = taught.accumulate_supervised(state.parameters, sums, microbatch)
        losses.append(sums.metrics.summary()["loss"])
        state, _ = taught.apply(state, sums)
    assert losses[0] > 1.5
    assert losses[-1] < 0.1


def test_recomputing_layers_changes_no_gradient(taught: Learner, parameters: Parameters):
    microbatches = packed(samples(3), 4)
    expected = accumulated(taught, parameters, microbatches)
    found = accumulated(learner(remat=True, head_chunk_logits=8 * QWEN3.vocab_size), parameters, microbatches)
    for name, value in mean_gradients(expected).items():
        np.testing.assert_allclose(mean_gradients(found)[name], value, atol=1e-6, err_msg=name)


def test_bfloat16_computes_and_keeps_float32_sums(parameters: Parameters):
    sums = accumulated(learner(compute_dtype="bfloat16"), parameters, packed(samples(3), 4))
    assert {value.dtype.name for value in sums.gradients.values()} == {"float32"}
    assert np.isfinite(float(sums.metrics.loss))


def test_programs_are_compiled_once_a_bucket(taught: Learner, parameters: Parameters):
    for chosen, rows in [(samples(4), 4), (samples(8), 8)]:
        accumulated(taught, parameters, packed(chosen, rows))
    compiled = taught.compilations
    state, _ = taught.apply(
        taught.initial_state(parameters), accumulated(taught, parameters, packed(samples(3, seed=1), 4))
    )
    for chosen, rows in [(samples(3, seed=2), 8), (samples(2, seed=3), 4)]:
        accumulated(taught, state.parameters, packed(chosen, rows))
    assert taught.compilations == compiled


def test_metrics_merge_as_if_of_one_batch(taught: Learner, parameters: Parameters):
    left, right = (accumulated(taught, parameters, packed(samples(3, seed=seed), 4)).metrics for seed in (1, 2))
    both = accumulated(
        taught, parameters, [*packed(samples(3, seed=1), 4), *packed(samples(3, seed=2), 4)]
    ).metrics.summary()
    assert merge(left, right).summary() == pytest.approx(both, rel=1e-6)
    assert both["ratio_max"] == max(left.summary()["ratio_max"], right.summary()["ratio_max"])


SMALL = replace(
    QWEN3,
    vocab_size=5,
    hidden_size=4,
    intermediate_size=3,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    initializer_range=0.5,
)
SETTINGS = config.Loss(
    anchor="start", correction="token_tis", correction_cap=1.1, kl_coefficient=0.2, entropy_coefficient=0.1
)
OPTIMIZER = config.Optimizer(
    learning_rate=0.05, schedule="linear", warmup_steps=1, epsilon=1e-2, weight_decay=0.1, max_gradient_norm=0.5
)


def numpy_loss(tensors: dict[str, np.ndarray], start: dict[str, np.ndarray], chosen: Sequence[Sample]) -> float:
    """The mean loss over action tokens in float64; the start of the step and the reference are both `start`."""
    losses = []
    for sample in chosen:
        ids, temperature = sample.token_ids, 0.8
        new = numpy_decoder.token_logprobs(SMALL, tensors, ids, temperature)
        old = numpy_decoder.token_logprobs(SMALL, start, ids, temperature)
        scores = numpy_decoder.logits(SMALL, tensors, ids) / temperature
        probabilities = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        entropies = np.concatenate([[0.0], -(probabilities * np.log(probabilities)).sum(axis=-1)[:-1]])
        for t in np.flatnonzero(sample.action_mask):
            ratio, advantage = np.exp(new[t] - old[t]), sample.advantage
            weight = min(np.exp(old[t] - sample.behaviour_logprobs[t]), SETTINGS.correction_cap)
            surrogate = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28))
            divergence = np.exp(old[t] - new[t]) - (old[t] - new[t]) - 1
            losses.append(weight * surrogate + 0.2 * divergence - 0.1 * entropies[t])
    return float(np.mean(losses))


def numpy_gradients(
    tensors: dict[str, np.ndarray], start: dict[str, np.ndarray], chosen: Sequence[Sample]
) -> dict[str, np.ndarray]:
    """Central differences of `numpy_loss`, number by number."""
    gradients = {}
    for name, tensor in tensors.items():
        gradients[name] = np.zeros_like(tensor)
        for index in np.ndindex(tensor.shape):
            shifted = []
            for shift in (1e-5, -1e-5):
                moved = tensor.copy()
                moved[index] += shift
                shifted.append(numpy_loss({**tensors, name: moved}, start, chosen))
            gradients[name][index] = (shifted[0] - shifted[1]) / 2e-5
    return gradients


def test_two_updates_agree_with_numpy_parameter_by_parameter():
    """Forward, loss, normalisation, clipping, AdamW and schedule, all again in NumPy by other means."""
    taught = learner(SMALL, optimizer=OPTIMIZER, loss=SETTINGS, steps=4, temperature=0.8)
    parameters = decoder.initial_parameters(SMALL, 0, MESH)
    chosen = samples(3, vocab_size=5, longest=8, seed=5)
    chosen = [replace(sample, behaviour_logprobs=sample.behaviour_logprobs + np.float32(1.4)) for sample in chosen]
    start = {name: np.array(value, np.float64) for name, value in parameters.items()}

    state = taught.initial_state(parameters)
    (microbatch,) = packed(chosen, 4)
    at_start = taught.logprobs(parameters, microbatch)
    tensors = dict(start)
    first = {name: np.zeros_like(value) for name, value in start.items()}
    second = {name: np.zeros_like(value) for name, value in start.items()}
    # One warm-up step of one update, then linear to 0 at step 4.
    for count, rate in enumerate([0.05, 0.05], start=1):
        gradients = numpy_gradients(tensors, start, chosen)
        norm = np.sqrt(sum((value**2).sum() for value in gradients.values()))

        sums = taught.accumulate(state.parameters, taught.zeros(), microbatch, at_start, at_start)
        summary = sums.metrics.summary()
        assert summary["loss"] == pytest.approx(numpy_loss(tensors, start, chosen), abs=1e-5)
        assert 0 < summary["correction_weight"] < 1.1  # some tokens meet the cap, others do not
        for name, value in mean_gradients(sums).items():
            np.testing.assert_allclose(value, gradients[name], atol=2e-5, err_msg=name)
        state, update = taught.apply(state, sums)
        assert float(update.gradient_norm) == pytest.approx(norm, rel=1e-4)
        assert float(update.learning_rate) == pytest.approx(rate)

        for name, value in gradients.items():
            clipped = value * min(1.0, 0.5 / norm)
            first[name] = 0.9 * first[name] + 0.1 * clipped
            second[name] = 0.95 * second[name] + 0.05 * clipped**2
            step = first[name] / (1 - 0.9**count) / (np.sqrt(second[name] / (1 - 0.95**count)) + 1e-2)
            decay = 0.1 * tensors[name] if tensors[name].ndim > 1 else 0.0
            tensors[name] = tensors[name] - rate * (step + decay)
            np.testing.assert_allclose(state.parameters[name], tensors[name], atol=1e-4, err_msg=name)
