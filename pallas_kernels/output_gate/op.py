"""The gate on attention's output (Qwen3-Next, gated attention)."""

from jaxtyping import Array, Float

from pallas_kernels.output_gate import reference
from pallas_kernels.rows import row_op

_op = row_op("output_gate", reference.output_gate)


def output_gate(o: Float[Array, "rows width"], gate: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """Scales attention's output by sigmoid(gate): in float32, rounded once to the dtype of `o`."""
    return _op(o, gate)
