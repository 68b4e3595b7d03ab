"""The definition of `norm_rope`: per-head RMS norm, then rotation of the first dimensions."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def norm_rope(
    x: Float[Array, "rows heads head_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    scale: Float[Array, "*heads head_dim"],
    *,
    eps: float,
) -> Float[Array, "rows heads head_dim"]:
    """RMS norm over a head's dimensions times (1 + scale); the first 2·half dimensions turn by pairs (i, i + half).

    In float32, rounded once to the dtype of `x`.
    """
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    mean_square = jnp.sum(wide * wide, axis=-1, keepdims=True) / x.shape[-1]
    normed = wide * lax.rsqrt(mean_square + eps) * (1.0 + scale)
    first, second, rest = normed[..., :half], normed[..., half : 2 * half], normed[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype)
