"""Root-mean-square norm with a zero-centred scale."""

import functools

from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.rms_norm import reference
from pallas_kernels.rows import row_op
from pallas_kernels.sharding import AxisName


def rms_norm(
    x: Float[Array, "rows width"],
    scale: Float[Array, " width"],
    *,
    eps: float = 1e-6,
    segments: Segments | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, "rows width"]:
    """Normalises each row of `x` and scales it by 1 + `scale`.

    A row's bits depend on that row, `scale` and `eps` alone. The gradient of `scale` is one
    partial per 64 rows, added in the order of `segment_sum`.

    Args:
        x: Rows in bfloat16 or float32; the arithmetic is float32, rounded once.
        scale: Zero-centred scale, float32.
        eps: Added to the mean square.
        segments: The sequence of every 64 rows of all ranks, for the gradient; by default one sequence.
        axis_name: The mesh axis that rows are sharded over, inside `shard_map`: every rank gets the gradient of
            `scale` that one device has.

    Raises:
        ShardingError: If ranks do not hold whole blocks of 64 rows.
    """
    return _op(eps)(x, scale, segments=segments, axis_name=axis_name)


@functools.cache
def _op(eps: float):
    return row_op("rms_norm", functools.partial(reference.rms_norm, eps=eps), num_shared=1)
