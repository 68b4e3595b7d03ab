"""The residual stream's add, a region so that XLA cannot contract it with what stands before."""

from jaxtyping import Array, Float

from pallas_kernels.residual_add import reference
from pallas_kernels.rows import row_op

_op = row_op("residual_add", reference.residual_add)


def residual_add(x: Float[Array, "rows width"], y: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """Adds a block's output `y` to the residual stream `x`: in float32, rounded once to the dtype of `x`.

    Raises:
        ValueError: If the dtypes differ.
    """
    if x.dtype != y.dtype:
        raise ValueError(f"residual_add takes one dtype, got {x.dtype} and {y.dtype}: round the block's output first")
    return _op(x, y)
