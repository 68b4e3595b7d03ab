"""The definition of `l2_norm`."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

EPS = 1e-6
"""Added to the sum of squares, inside the root (fixed in the model family)."""


def l2_norm(x: Float[Array, "*rows head_dim"], *, scale: float) -> Float[Array, "*rows head_dim"]:
    """x / sqrt(Σx² + eps) · scale over the last axis, in float32, rounded once to the dtype of `x`."""
    wide = x.astype(jnp.float32)
    return (wide * (lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPS) * scale)).astype(x.dtype)
