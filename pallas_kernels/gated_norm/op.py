"""Norm and gate on the output of Gated DeltaNet."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.rows import row_op
from pallas_kernels.sharding import AxisName
from pallas_kernels.spread import spread, sum_axis


def gated_norm(
    o: Float[Array, "rows heads head_dim"],
    z: Float[Array, "rows heads head_dim"],
    scale: Float[Array, " head_dim"],
    *,
    eps: float = 1e-6,
    segments: Segments | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """RMS norm of every head of `o`, times `scale` (not zero-centred), times silu(`z`).

    Float32 with one rounding; sums in tree order. A head's bits depend on its own values alone, whatever the
    number of rows and heads. The gradient of `scale` adds 64 rows in tree order head by head, then
    the heads (`spread.head_sum`), and follows `segment_sum`.

    Args:
        o: Output of the delta rule, bfloat16 or float32.
        z: Input of the gate.
        scale: Shared by the heads, float32.
        eps: Added to the mean square.
        segments: The sequence of every 64 rows, for the gradient of `scale`; by default one sequence.
        axis_name: The mesh axis that heads are sharded over, inside `shard_map`: every rank gets the gradient of
            `scale` that one device has.
    """
    return _op(eps)(o, z, scale, segments=segments, axis_name=axis_name)


def _rows(o: jax.Array, z: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    rows, _, width = o.shape
    wide = o.astype(jnp.float32)
    factor = lax.rsqrt(sum_axis(wide * wide, -1) / width + eps)
    normed = wide * spread(factor, -1, width) * spread(scale.astype(jnp.float32)[None], 0, rows)
    return (normed * jax.nn.silu(z.astype(jnp.float32))).astype(o.dtype)


@functools.cache
def _op(eps: float):
    return row_op("gated_norm", functools.partial(_rows, eps=eps), num_shared=1, per_head=True)
