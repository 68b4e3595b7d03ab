"""The native twin of `moe_combine`: one contraction over ranks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.experts import Plan
from pallas_kernels.moe_combine.reference import outputs_of_rows


def moe_combine(
    y: Float[Array, "pairs width"],
    weights: Float32[Array, "rows ranks"],
    plan: Plan,
    shared: Float[Array, "rows width"],
    shared_gate: Float[Array, "rows 1"],
) -> Float[Array, "rows width"]:
    """Computes `reference.combine` without a promise about bits."""
    plan.refuse_ranks("moe_combine")
    routed = jnp.einsum("rkw,rk->rw", outputs_of_rows(y, plan).astype(jnp.float32), weights)
    return (routed + jax.nn.sigmoid(shared_gate.astype(jnp.float32)) * shared.astype(jnp.float32)).astype(y.dtype)
