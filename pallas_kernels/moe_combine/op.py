"""A token's expert outputs, brought home and added."""

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels.experts import Plan
from pallas_kernels.moe_combine import reference
from pallas_kernels.rows import row_op


def moe_combine(
    y: Float[Array, "pairs width"],
    weights: Float32[Array, "rows ranks"],
    plan: Plan,
    shared: Float[Array, "rows width"],
    shared_gate: Float[Array, "rows 1"],
) -> Float[Array, "rows width"]:
    """Adds each row's weighted expert outputs and its gated shared expert.

    The terms are rounded products in float32, chained by ascending rank from the first, the shared
    expert's last; one rounding. A row's bits depend on its own terms alone. On ranks outputs come home unadded.

    Args:
        y: Expert outputs in the layout of `plan`.
        weights: The router's weights; zero for a row without experts, whose routed part is then zero.
        plan: Where the pairs of each row lie.
        shared: The shared expert's output, in the dtype of `y`.
        shared_gate: Its gate before the sigmoid.
    """
    return _combine(_outputs_of_rows(y, plan), weights, shared, shared_gate)


@jax.custom_vjp
def _outputs_of_rows(y, plan):
    return plan.from_owners(reference.outputs_of_rows(y, plan))


def _outputs_of_rows_backward(plan, cotangent):
    # Every pair has one row and rank: the transpose is a gather too. Pads lie outside and get zero.
    return plan.all_rows(cotangent).at[plan.row, plan.rank].get(mode="fill", fill_value=0), None


_outputs_of_rows.defvjp(lambda y, plan: (_outputs_of_rows(y, plan), plan), _outputs_of_rows_backward)

_combine = row_op("moe_combine", reference.combine)
