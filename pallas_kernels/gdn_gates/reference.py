"""The definition of `gdn_gates` (Yang et al. 2025, Gated DeltaNet; Qwen3-Next parametrisation)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def gdn_gates(
    a: Float[Array, "rows heads"],
    b: Float[Array, "rows heads"],
    A_log: Float[Array, "*rows heads"],
    dt_bias: Float[Array, "*rows heads"],
) -> tuple[Float32[Array, "rows heads"], Float32[Array, "rows heads"]]:
    """Log decay −exp(A_log) · softplus(a + dt_bias) and writing strength sigmoid(b), in float32.

    Torch's softplus is linear above 20; the exact one differs from that by 2e-9, below float32's rounding there.
    """
    a, b, A_log, dt_bias = (x.astype(jnp.float32) for x in (a, b, A_log, dt_bias))
    return -(jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)), jax.nn.sigmoid(b)
