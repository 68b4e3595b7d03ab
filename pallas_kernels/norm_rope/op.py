"""Query and key norm with partial rotary embedding, one region."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.region import exact_product
from pallas_kernels.rows import row_op
from pallas_kernels.sharding import AxisName
from pallas_kernels.spread import spread, sum_axis


def norm_rope(
    x: Float[Array, "rows heads head_dim"],
    scale: Float[Array, " head_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    *,
    eps: float = 1e-6,
    segments: Segments | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """Normalises each head of each row and turns its first 2·half dimensions by the row's position.

    Float32 with one rounding; sums in tree order. A head's bits depend on its own values alone, whatever the number
    of rows and heads. The gradient of `scale` adds 64 rows head by head, then the heads (`spread.head_sum`), then
    follows `segment_sum`.

    Args:
        x: Queries or keys, bfloat16 or float32.
        scale: Zero-centred scale shared by the heads, float32.
        cos: Cosines of each row's position, float32, from `rotary_tables`.
        sin: Sines, likewise.
        eps: Added to the mean square.
        segments: The sequence of every 64 rows, for the gradient; by default one sequence.
        axis_name: The mesh axis that heads are sharded over, inside `shard_map`: every rank gets the gradient of
            `scale` that one device has.

    Raises:
        ValueError: If the tables turn more dimensions than a head has, or are not float32.
    """
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"norm_rope turns {2 * cos.shape[-1]} dimensions of heads of {x.shape[-1]}: check rotary_dim")
    if cos.dtype.name != "float32" or sin.dtype.name != "float32":
        raise ValueError(f"norm_rope takes float32 tables, got {cos.dtype} and {sin.dtype}: use rotary_tables")
    return _op(eps)(x, cos, sin, scale, segments=segments, axis_name=axis_name)


def _rows(x: jax.Array, cos: jax.Array, sin: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    rows, heads, width = x.shape
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    factor = lax.rsqrt(sum_axis(wide * wide, -1) / width + eps)
    normed = wide * spread(factor, -1, width) * spread(1.0 + scale[None], 0, rows)
    first, second, rest = normed[..., :half], normed[..., half : 2 * half], normed[..., 2 * half :]
    cos, sin = (jnp.broadcast_to(table[:, None, :], (rows, heads, half)) for table in (cos, sin))
    # All four products are rounded: over 4 of 32 dimensions rows differ by where they stand in the block otherwise.
    turned = [
        exact_product(first, cos) - exact_product(second, sin),
        exact_product(second, cos) + exact_product(first, sin),
    ]
    return jnp.concatenate([*turned, rest], axis=-1).astype(x.dtype)


@functools.cache
def _op(eps: float):
    return row_op("norm_rope", functools.partial(_rows, eps=eps), num_shared=1, per_head=True, constants=(1, 2))
