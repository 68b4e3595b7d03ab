"""The definitions of `sample` and `truncation_mask`."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def sample(
    logits: Float[Array, "rows vocab"],
    noise: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    keep: Bool[Array, "rows vocab"],
) -> Int32[Array, " rows"]:
    """The kept word with the largest logit/temperature + standard Gumbel noise (Gumbel 1954)."""
    scores = jnp.where(keep, logits / temperature[:, None] + noise, -jnp.inf)
    return jnp.argmax(scores, axis=1).astype(jnp.int32)


def truncation_mask(
    logits: Float[Array, "rows vocab"],
    *,
    temperature: Float[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
) -> Bool[Array, "rows vocab"]:
    """Ranks words by descending logit and ascending word; keeps those that min-p, top-k and top-p all leave."""
    ranked = jnp.argsort(-logits, axis=1, stable=True)
    scaled = jnp.take_along_axis(logits, ranked, axis=1) / temperature[:, None]
    e = jnp.exp(scaled - scaled[:, :1])
    rank = jnp.arange(logits.shape[1])
    left = (e >= min_p[:, None]) & ((rank < top_k[:, None]) | (top_k[:, None] < 1))
    e = jnp.where(left, e, 0)
    before = jnp.cumsum(e, axis=1) - e
    left &= (before < top_p[:, None] * jnp.sum(e, axis=1, keepdims=True)) | (top_p[:, None] >= 1)
    left |= rank == 0
    return jnp.take_along_axis(left, jnp.argsort(ranked, axis=1), axis=1)
