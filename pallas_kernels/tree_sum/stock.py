"""The native twins: XLA's own reductions, differentiated by autodiff."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from isojax.layouts import Segments


def tree_sum(parts: Float[Array, "parts *shape"]) -> Float[Array, "*shape"]:
    """The sum over the leading axis, in the order that XLA chooses."""
    return jnp.sum(parts, axis=0)


def sum_tokens(values: Float32[Array, " rows"], segments: Segments | None = None) -> Float32[Array, ""]:
    """The sum of all rows, in the order that XLA chooses."""
    del segments
    return jnp.sum(values)
