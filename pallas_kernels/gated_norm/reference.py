"""The definition of `gated_norm` (Qwen3-Next: norm before gate, plain scale)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def gated_norm(
    o: Float[Array, "rows heads head_dim"],
    z: Float[Array, "rows heads head_dim"],
    scale: Float[Array, " head_dim"],
    *,
    eps: float,
) -> Float[Array, "rows heads head_dim"]:
    """o · rsqrt(mean(o²) + eps) · scale · silu(z) for every head, in float32, rounded once to the dtype of `o`."""
    wide = o.astype(jnp.float32)
    mean_square = jnp.sum(wide * wide, axis=-1, keepdims=True) / o.shape[-1]
    return (wide * lax.rsqrt(mean_square + eps) * scale * jax.nn.silu(z.astype(jnp.float32))).astype(o.dtype)
