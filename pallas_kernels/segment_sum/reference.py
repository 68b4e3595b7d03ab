"""The definition of `segment_sum`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from isojax import trees
from isojax.layouts import Segments


def segment_sum(partials: Float[Array, "blocks *shape"], segments: Segments) -> Float[Array, "*shape"]:
    """Adds the partials of each sequence in a chain, the sequences in tree order, in float32."""
    terms = partials.astype(jnp.float32)
    zero = jnp.zeros(partials.shape[1:], jnp.float32)
    sums = [
        trees.chain(jnp.add, [zero, *(t for t, s in zip(terms, segments.sequence, strict=True) if s == index)])
        for index in range(segments.count)
    ]
    return trees.fold(jnp.add, sums).astype(partials.dtype)
