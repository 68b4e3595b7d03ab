"""The definition of a linear layer's sums."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from isojax import trees


def product(
    lhs: Float[Array, "rows splits depth"], rhs: Float[Array, "columns splits depth"], blocks: Sequence[int]
) -> Float[Array, "rows columns"]:
    """Σ over splits (a tree) of Σ over blocks (a chain) of block products, in float32."""
    lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)

    def split(s: int):
        total = jnp.zeros((lhs.shape[0], rhs.shape[0]), jnp.float32)
        start = 0
        for block in blocks:
            end = start + block
            total += lhs[:, s, start:end] @ rhs[:, s, start:end].T
            start = end
        return total

    return trees.fold(jnp.add, [split(s) for s in range(lhs.shape[1])])
