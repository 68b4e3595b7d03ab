"""The definitions of `tree_sum` and `sum_tokens`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from isojax import trees
from isojax.layouts import CHUNK, Segments
from pallas_kernels.segment_sum import reference as segment_sum


def tree_sum(parts: Float[Array, "parts *shape"]) -> Float[Array, "*shape"]:
    """Adds the parts in tree order, in float32, and rounds once."""
    terms = [part.astype(jnp.float32) for part in parts]
    return trees.fold(jnp.add, terms).astype(parts.dtype)


def sum_tokens(values: Float[Array, " rows"], segments: Segments) -> Float[Array, ""]:
    """Adds 64 rows in tree order, the blocks of a sequence in a chain, the sequences in tree order."""
    padded = jnp.pad(values, (0, -values.shape[0] % CHUNK))
    return segment_sum.segment_sum(tree_sum(padded.reshape(-1, CHUNK).T), segments)
