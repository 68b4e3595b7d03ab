"""The words that an engine lists beside the drawn one."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.ordering import ordered


def top_logprobs(
    logprobs: Float32[Array, "rows vocab"], tokens: Int32[Array, " rows"], k: int
) -> tuple[Int32[Array, "rows listed"], Float32[Array, "rows listed"], Int32[Array, " rows"]]:
    """The drawn word and the `k` likeliest, in vLLM's `LogprobsLists` form; data movement only.

    Args:
        logprobs: Of every word (`logprobs_all`).
        tokens: The drawn word of each row.
        k: How many words to list; 0 for the drawn one alone.

    Returns:
        Words `[rows, 1 + k]`: column 0 is the drawn word, the others are the likeliest in descending order,
        equal ones by ascending word. A drawn word among the likeliest stands in both places with the same bits, as
        vLLM expects; whoever makes a mapping of them has it once. Then their log-probabilities, and the
        rank of the drawn word: how many words are at least as likely.
    """
    order = ordered(logprobs)
    drawn = tokens[:, None]
    _, likeliest = lax.top_k(order, k)  # Equal integers: lower index first.
    words = jnp.concatenate([drawn, likeliest.astype(jnp.int32)], axis=1)
    at_least = order >= jnp.take_along_axis(order, drawn, axis=1)
    return words, jnp.take_along_axis(logprobs, words, axis=1), jnp.sum(at_least, axis=1, dtype=jnp.int32)
