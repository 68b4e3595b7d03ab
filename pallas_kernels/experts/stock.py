"""The native twins of the expert ops: XLA's grouped product, gradients by autodiff."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.experts import reference
from pallas_kernels.experts.plan import TILE, Plan


def gather_rows(x: Float[Array, "rows width"], plan: Plan) -> Float[Array, "pairs width"]:
    """`reference.gather_rows`, whose gradient is XLA's scatter-add."""
    plan.refuse_ranks("gather_rows")
    return reference.gather_rows(x, plan)


def grouped_linear(
    x: Float[Array, "pairs inputs"], weight: Float[Array, "experts outputs inputs"], plan: Plan
) -> Float[Array, "pairs outputs"]:
    """Computes `reference.grouped_linear` by `lax.ragged_dot`, without a promise about bits."""
    pairs = TILE * jnp.diff(plan.first_tile[:: plan.num_sequences])
    return lax.ragged_dot(x, weight.astype(x.dtype).swapaxes(1, 2), pairs)
