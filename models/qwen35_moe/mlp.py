"""What follows the mixer: experts with a shared expert, or one dense MLP."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.binding import Ops
from pallas_kernels.experts import dispatch_plan
from qwen35_moe.config import Config
from qwen35_moe.context import Context

type Weights = dict[str, Array]


def mlp(
    weights: Weights, x: Float[Array, "rows embed"], context: Context, config: Config, ops: Ops
) -> tuple[Float[Array, "rows embed"], tuple[Array, Array] | None]:
    """The layer's MLP over normalised rows (docs/model.md).

    Returns:
        The output, and the router's logits and choices for the load-balancing loss (None without experts).
    """
    if config.is_moe:
        return _experts(weights, x, context, config, ops)
    gate, up = ops.column_linear(x, (weights["gate_proj"], weights["up_proj"]), segments=context.segments)
    return ops.row_linear(ops.swiglu(gate, up), weights["down_proj"], segments=context.segments), None


def _experts(weights: Weights, x, context: Context, config: Config, ops: Ops):
    segments = context.segments
    to_projections, to_experts = ops.fork(x, 2)
    logits, gate, up, shared_gate = ops.column_linear(
        to_projections,
        (weights["router"], weights["shared_gate_proj"], weights["shared_up_proj"], weights["shared_gate"]),
        out_dtypes=(jnp.float32, None, None, None),
        segments=segments,
    )
    # Selection takes the scores in float32: rounded ones collapse to ties.
    to_router, to_loss = ops.fork(logits, 2)
    chosen_weights, chosen = ops.router(to_router, context.step.valid, top_k=config.num_experts_per_tok)
    plan = dispatch_plan(chosen, config.num_experts, segments)
    hidden = ops.grouped_linear(ops.gather_rows(to_experts, plan), weights["gate_up"], plan)
    routed = ops.grouped_linear(ops.swiglu_fused(hidden), weights["down"], plan)
    # The shared expert is small: every rank computes the whole, so its product needs no tree.
    (shared,) = ops.column_linear(ops.swiglu(gate, up), (weights["shared_down_proj"],), segments=segments)
    return ops.moe_combine(routed, chosen_weights, plan, shared, shared_gate), (to_loss, chosen)
