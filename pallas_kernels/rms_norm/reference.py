"""The definition of `rms_norm` (Zhang & Sennrich 2019; zero-centred scale as in Qwen3-Next)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "rows width"], scale: Float[Array, " width"], *, eps: float) -> Float[Array, "rows width"]:
    """x · rsqrt(mean(x²) + eps) · (1 + scale), in float32, rounded once to the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.sum(wide * wide, axis=-1, keepdims=True) / x.shape[-1]
    return (wide * lax.rsqrt(mean_square + eps) * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
