"""The definitions of the expert ops, over the pairs of a `Plan`."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.experts.plan import TILE, Plan


def gather_rows(x: Float[Array, "rows width"], plan: Plan) -> Float[Array, "pairs width"]:
    """The row of every pair; zero for pads."""
    return x.at[plan.row].get(mode="fill", fill_value=0)


def grouped_linear(
    x: Float[Array, "pairs inputs"], weight: Float[Array, "experts outputs inputs"], plan: Plan
) -> Float[Array, "pairs outputs"]:
    """Every pair times the weight of its expert, which is rounded to the dtype of `x`; zero for pads."""
    tiles = jnp.where(real_pairs(plan)[:, None], x, 0).reshape(-1, TILE, x.shape[-1])
    weights = weight.astype(x.dtype)[jnp.minimum(plan.tile_expert, plan.num_experts - 1)]
    out = jnp.einsum(
        "tpi,toi->tpo", tiles, weights, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return out.reshape(x.shape[0], -1).astype(x.dtype)


def real_pairs(plan: Plan):
    """Which pairs are no pads."""
    return (jnp.arange(TILE) < plan.tile_pairs[:, None]).reshape(-1)
