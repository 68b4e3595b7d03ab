"""The definitions of `embed` and of its gradient."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from isojax import trees
from isojax.layouts import CHUNK, Segments


def embed(
    tokens: Int32[Array, " rows"], table: Float[Array, "words width"], *, dtype: DTypeLike
) -> Float[Array, "rows width"]:
    """`table[tokens]`, rounded to `dtype`."""
    return table[tokens].astype(dtype)


def table_gradient(
    tokens: Int32[Array, " rows"], cotangent: Float[Array, "rows width"], words: int, segments: Segments
) -> Float[Array, "words width"]:
    """Adds, for each sequence, the rows of a word in a chain; then the sequences in tree order; in float32."""
    sums = [jnp.zeros((words, cotangent.shape[1]), jnp.float32)] * segments.count
    for row, (token, term) in enumerate(zip(tokens, cotangent.astype(jnp.float32), strict=True)):
        sequence = int(segments.sequence[row // CHUNK])
        sums[sequence] = sums[sequence].at[token].set(sums[sequence][token] + term)
    return trees.fold(jnp.add, sums)
