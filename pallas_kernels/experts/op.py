"""From rows to the pairs of their experts and through the experts' weights."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from isojax import trees
from pallas_kernels.cast import cast
from pallas_kernels.experts import kernel, reference
from pallas_kernels.experts.kernel import Schedule
from pallas_kernels.experts.plan import Plan
from pallas_kernels.rows import row_op


def gather_rows(x: Float[Array, "own_rows width"], plan: Plan) -> Float[Array, "pairs width"]:
    """Copies each row of `x` to its pairs, on the ranks that have their experts; pads get zero.

    The gradient of a row is the chain over its pairs by ascending rank, in float32, rounded once.
    """
    return _gather_rows(x, plan)


def grouped_linear(
    x: Float[Array, "pairs inputs"],
    weight: Float[Array, "experts outputs inputs"],
    plan: Plan,
    *,
    schedule: Schedule = Schedule(),
) -> Float[Array, "pairs outputs"]:
    """Multiplies each pair by the weight of its expert.

    A pair's bits depend on its row and its expert's weight alone: not on its place, the other pairs
    or the schedule. Sums are float32 chains over blocks of `layouts.block_of`, rounded once.
    The weight's gradient is, for each expert, a chain over 16-pair products in each sequence and
    a tree over sequences (as `segment_sum`), in float32; zero for an expert without pairs.

    Args:
        x: Pairs in the layout of `plan`, bfloat16 or float32; pads may hold anything.
        weight: `[out, in]` of every expert of this rank, rounded to the dtype of `x` first.
        plan: Where the pairs of each expert lie.
        schedule: How the work is cut into programs.

    Returns:
        The products in the dtype of `x`; zero for pads and dead tiles.

    Raises:
        ValueError: If `weight` has another number of experts than `plan`.
    """
    if weight.shape[0] != plan.num_experts:
        raise ValueError(
            f"grouped_linear got weights of {weight.shape[0]} experts for a plan of {plan.num_experts}:"
            " pass those of all experts that the plan was made for, on ranks those of the rank"
        )
    return _grouped_linear(schedule, x, weight, plan)


@jax.custom_vjp
def _gather_rows(x, plan):
    return reference.gather_rows(plan.all_rows(x), plan)


def _gather_rows_backward(plan, cotangent):
    # Where a rank has no pair the fill is zero.
    terms = cotangent.at[plan.position].get(mode="fill", fill_value=0)
    return _add_ranks(plan.from_owners(terms)), None


_gather_rows.defvjp(lambda x, plan: (_gather_rows(x, plan), plan), _gather_rows_backward)


def _chain_ranks(pairs):
    terms = lax.split(pairs.astype(jnp.float32), [1] * pairs.shape[1], axis=1)
    return trees.chain(jnp.add, terms)[:, 0].astype(pairs.dtype)


_add_ranks = row_op("gather_rows.backward", _chain_ranks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_linear(schedule, x, weight, plan):
    return kernel.product("grouped_linear", x, cast(weight, x.dtype), plan, schedule, contract=2)


def _grouped_linear_backward(schedule, residuals, out_grad):
    x, weight, plan = residuals
    x_grad = kernel.product("grouped_linear.backward", out_grad, cast(weight, x.dtype), plan, schedule, contract=1)
    weight_grad = kernel.weight_gradient("grouped_linear.weight_gradient", out_grad, x, plan)
    return x_grad, cast(weight_grad, weight.dtype), None


_grouped_linear.defvjp(
    lambda schedule, x, weight, plan: (_grouped_linear(schedule, x, weight, plan), (x, weight, plan)),
    _grouped_linear_backward,
)
