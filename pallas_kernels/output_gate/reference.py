"""The definition of `output_gate`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def output_gate(o: Float[Array, "rows width"], gate: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """o · sigmoid(gate) in float32, rounded once to the dtype of `o`."""
    return (o.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(o.dtype)
