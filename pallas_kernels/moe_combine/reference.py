"""The definition of `moe_combine`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from isojax import trees
from pallas_kernels.experts import Plan
from pallas_kernels.region import exact_product


def outputs_of_rows(y: Float[Array, "pairs width"], plan: Plan) -> Float[Array, "rows ranks width"]:
    """The expert outputs of every row, by rank; zero where a rank has no expert."""
    return y.at[plan.position].get(mode="fill", fill_value=0)


def combine(
    y: Float[Array, "rows ranks width"],
    weights: Float32[Array, "rows ranks"],
    shared: Float[Array, "rows width"],
    shared_gate: Float[Array, "rows 1"],
) -> Float[Array, "rows width"]:
    """Σ weights · y by ascending rank, then + sigmoid(shared_gate) · shared, in float32, rounded once."""
    ranks = y.shape[1]
    outputs = lax.split(y.astype(jnp.float32), [1] * ranks, axis=1)
    shares = lax.split(weights, [1] * ranks, axis=1)
    # Products are rounded before they are added, whatever the compiler would contract.
    terms = [exact_product(output[:, 0], share) for output, share in zip(outputs, shares, strict=True)]
    gate = jax.nn.sigmoid(shared_gate.astype(jnp.float32))
    terms.append(exact_product(gate, shared.astype(jnp.float32)))
    return trees.chain(jnp.add, terms).astype(y.dtype)
