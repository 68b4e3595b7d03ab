"""The gated activation of every MLP, in the two layouts in which projections deliver it."""

from jaxtyping import Array, Float

from pallas_kernels.rows import row_op
from pallas_kernels.swiglu import reference


def swiglu(gate: Float[Array, "rows width"], up: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """silu(`gate`) · `up`, for projections that are separate weights.

    A row's bits depend on that row alone: float32 inside, rounded once.
    """
    return _swiglu(gate, up)


def swiglu_fused(gate_up: Float[Array, "rows two_widths"]) -> Float[Array, "rows width"]:
    """`swiglu` of the halves [gate | up] of each row, for experts whose projections are one weight.

    Raises:
        ValueError: If the width is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu_fused halves its rows, got width {gate_up.shape[-1]}: pass [gate | up]")
    return _swiglu_fused(gate_up)


_swiglu = row_op("swiglu", reference.swiglu)
_swiglu_fused = row_op("swiglu_fused", reference.swiglu_fused)
