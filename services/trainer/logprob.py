"""Log-probabilities over a vocabulary without the logits of all tokens at once.

Shapes: B rows, T tokens of a row, C tokens of a chunk, D hidden units, V words of the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden_BTD: jax.Array, head_VD: jax.Array, tokens_BT: jax.Array, *, temperature: float, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Scores each token as predicted from the place before it.

    Args:
        temperature: divides the logits, as it did when the tokens were sampled.
        chunk_tokens: tokens whose logits exist at once, forward and backward; at least one of every row.

    Returns:
        logprobs_BT and entropies_BT (of the distribution that the token was drawn from), float32 in nats; both 0 at the
        first token of a row, and without meaning at the first token of a later segment.
    """
    rows, length, _ = hidden_BTD.shape
    chunk = min(length, max(1, chunk_tokens // rows))
    chunks = -(-length // chunk)
    next_tokens_BT = jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, chunks * chunk - length + 1)))
    hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, chunks * chunk - length), (0, 0)))

    # Rows stay whole, so a batch that is sharded by rows needs no exchange here.
    @jax.checkpoint
    def of_chunk(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden_BCD = jax.lax.dynamic_slice_in_dim(hidden_BTD, start, chunk, axis=1)
        chosen_BC = jax.lax.dynamic_slice_in_dim(next_tokens_BT, start, chunk, axis=1)
        return _score(hidden_BCD, head_VD, chosen_BC, temperature)

    if chunks == 1:
        logprobs_BT, entropies_BT = _score(hidden_BTD, head_VD, next_tokens_BT, temperature)
    else:
        scores = jax.lax.map(of_chunk, jnp.arange(chunks) * chunk)
        logprobs_BT, entropies_BT = (jnp.moveaxis(x, 0, 1).reshape(rows, -1) for x in scores)
    return tuple(jnp.pad(x[:, : length - 1], ((0, 0), (1, 0))) for x in (logprobs_BT, entropies_BT))  # type: ignore[return-value]


def _score(
    hidden_BCD: jax.Array, head_VD: jax.Array, chosen_BC: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    head_VD = head_VD.astype(hidden_BCD.dtype)
    logits_BCV = jnp.einsum("bcd,vd->bcv", hidden_BCD, head_VD, preferred_element_type=jnp.float32) / temperature
    log_normaliser_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    chosen_logits_BC = jnp.take_along_axis(logits_BCV, chosen_BC[..., None], axis=-1)[..., 0]
    probabilities_BCV = jnp.exp(logits_BCV - log_normaliser_BC[..., None])
    entropies_BC = log_normaliser_BC - jnp.sum(probabilities_BCV * logits_BCV, axis=-1)
    return chosen_logits_BC - log_normaliser_BC, entropies_BC
