"""The native twins: XLA's own cumulative sum and JAX's own sampler."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pallas_kernels.sample import reference
from pallas_kernels.sample.op import GREEDY


def truncation_mask(
    logits: Float32[Array, "rows vocab"],
    *,
    temperature: Float32[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    vocab: int | None = None,
) -> Bool[Array, "rows vocab"]:
    """The words that each row may draw, by sums in the order that XLA chooses."""
    real = logits[:, :vocab]
    keep = reference.truncation_mask(real, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return jnp.pad(keep, ((0, 0), (0, logits.shape[1] - real.shape[1])))


def sample(
    logits: Float32[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    temperature: Float32[Array, " rows"],
    keep: Bool[Array, "rows vocab"] | None = None,
    *,
    vocab: int | None = None,
) -> Int32[Array, " rows"]:
    """Draws a word for each row with `jax.random.categorical`; the same keys draw other words than the exact op."""
    greedy = temperature < GREEDY
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    live = jnp.arange(logits.shape[1]) < (logits.shape[1] if vocab is None else vocab)
    scaled = jnp.where(live if keep is None else live & keep, scaled, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(jax.random.wrap_key_data(keys, impl="threefry2x32"), scaled)
    return jnp.where(greedy, jnp.argmax(scaled, axis=1), drawn).astype(jnp.int32)
