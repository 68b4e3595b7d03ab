"""The definition of `residual_add`."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def residual_add(x: Float[Array, "rows width"], y: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """x + y in float32, rounded once to the dtype of `x`."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
