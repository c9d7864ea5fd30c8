"""Log-probabilities over a vocabulary without the logits of all tokens at once."""

from __future__ import annotations

import jax


def token_logprobs(
    hidden_BTD: jax.Array, head_VD: jax.Array, tokens_BT: jax.Array, *, temperature: float, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """(logprobs_BT, entropies_BT) of each token as predicted from the place before it."""
    raise NotImplementedError
