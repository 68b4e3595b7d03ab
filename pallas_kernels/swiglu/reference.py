"""The definition of `swiglu` (Shazeer 2020)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "rows width"], up: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """silu(gate) · up, in float32, rounded once to the dtype of `gate`."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def swiglu_fused(gate_up: Float[Array, "rows two_widths"]) -> Float[Array, "rows width"]:
    """`swiglu` of the two halves of each row: gate first, then up."""
    width = gate_up.shape[-1] // 2
    return swiglu(gate_up[:, :width], gate_up[:, width:])
