"""Unit length for queries and keys of Gated DeltaNet."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.l2_norm.reference import EPS
from pallas_kernels.rows import row_op
from pallas_kernels.spread import spread, sum_axis


def l2_norm(x: Float[Array, "rows heads head_dim"], *, scale: float = 1.0) -> Float[Array, "rows heads head_dim"]:
    """Scales every head of every row to length `scale`: x / sqrt(Σx² + 1e-6) · scale.

    Float32 with one rounding; the sum is in tree order. A head's bits depend on its own values alone, whatever
    the number of rows and heads. A row of zeros stays zero and has a finite gradient.

    Args:
        x: Queries or keys, bfloat16 or float32.
        scale: The length, e.g. head_dim^-0.5 for queries.
    """
    return _op(scale)(x)


def _rows(x: jax.Array, *, scale: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    factor = lax.rsqrt(sum_axis(wide * wide, -1) + EPS) * scale
    return (wide * spread(factor, -1, x.shape[-1])).astype(x.dtype)


@functools.cache
def _op(scale: float):
    return row_op("l2_norm", functools.partial(_rows, scale=scale))
