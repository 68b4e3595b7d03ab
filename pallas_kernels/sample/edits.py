"""Logits changed by request before a token is drawn."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.rows import row_op

_add = row_op("logit_bias", lambda logits, bias: logits + bias)


def edit_logits(
    logits: Float32[Array, "rows vocab"],
    words: Int32[Array, "rows edits"],
    bias: Float32[Array, "rows edits"],
    only: Bool[Array, " rows"],
) -> Float32[Array, "rows vocab"]:
    """`logits` with a bias added to named words; rows and words that none names keep their bits.

    Args:
        logits: Scores of all words.
        words: What a row names, each word once; `vocab` and above name nothing.
        bias: Added to the logits of `words`, −∞ to forbid one.
        only: Rows that leave no word but those they name.
    """
    rows = jnp.arange(len(logits))[:, None]
    biased = _add(logits.at[rows, words].get(mode="clip"), bias)
    named = jnp.zeros(logits.shape, bool).at[rows, words].set(True, mode="drop")
    logits = logits.at[rows, words].set(biased, mode="drop")
    return jnp.where(only[:, None] & ~named, -jnp.inf, logits)
