"""Comparing floats as integers: which is larger is data movement, not arithmetic."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

_NAN = jnp.iinfo(jnp.int32).max
_INFINITY = 0x7F800000


def ordered(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Integers that order as the floats do: −0 equals 0, and every NaN is above infinity (it must not get lost)."""
    word = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = word & 0x7FFFFFFF
    signed = jnp.where(word < 0, -magnitude, magnitude)
    return jnp.where(magnitude > _INFINITY, _NAN, signed)
