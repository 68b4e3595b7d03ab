"""The native twins: the same choice by XLA's own `top_k`, the balancing loss as it is defined."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.router.reference import load_balancing_loss

__all__ = ["load_balancing_loss", "router"]


def router(
    logits: Float32[Array, "rows experts"], valid: Bool[Array, " rows"], *, top_k: int
) -> tuple[Float32[Array, "rows {top_k}"], Int32[Array, "rows {top_k}"]]:
    """Computes `reference.router` without a promise about bits."""
    here = valid[:, None]
    p, experts = lax.top_k(jax.nn.softmax(jnp.where(here, logits, 0.0)), top_k)
    weights = p / jnp.sum(p, axis=-1, keepdims=True)
    return jnp.where(here, weights, 0.0), jnp.where(here, experts, logits.shape[-1])
