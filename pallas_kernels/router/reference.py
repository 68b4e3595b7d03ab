"""The definition of `router`: softmax over all experts, the top k, renormalised (Qwen3-Next, Qwen3.5-MoE)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from isojax import trees
from pallas_kernels.elementwise import exact_quotient


def router(
    logits: Float[Array, "rows experts"], valid: Bool[Array, " rows"], *, top_k: int
) -> tuple[Float32[Array, "rows {top_k}"], Int32[Array, "rows {top_k}"]]:
    """Weights and experts of each row by descending probability; equal probabilities by ascending expert.

    Written with maxima, minima and masks alone, which any kernel backend has; selecting by mask
    makes the gradient a mask too.
    """
    rows, num_experts = logits.shape
    here = valid[:, None]
    p = _probabilities(logits, here)
    expert = lax.broadcasted_iota(jnp.int32, p.shape, 1)
    rank = lax.broadcasted_iota(jnp.int32, (rows, top_k), 1)
    left = lax.stop_gradient(p)
    experts = jnp.full((rows, top_k), num_experts, jnp.int32)
    picked = []
    for r in range(top_k):
        best = jnp.max(left, axis=-1, keepdims=True)
        # A row with NaN has no best: it gets no expert and a NaN weight, so that it stays visible.
        first = jnp.min(jnp.where(left == best, expert, num_experts), axis=-1, keepdims=True)
        chosen = expert == first
        picked.append(jnp.sum(jnp.where(chosen, p, 0.0), axis=-1, keepdims=True))
        experts = jnp.where((rank == r) & here, first, experts)
        left = jnp.where(chosen, -1.0, left)
    total = trees.chain(jnp.add, picked)
    weights = jnp.zeros((rows, top_k), jnp.float32)
    for r, value in enumerate(picked):
        weights = jnp.where((rank == r) & here, value / total, weights)
    return weights, experts


def load_balancing_loss(
    logits: Float[Array, "rows experts"], valid: Bool[Array, " rows"], counts: Int32[Array, " experts"], *, top_k: int
) -> Float32[Array, " rows"]:
    """E/R · Σ_e (counts_e/R) · p_e of each row, R = Σ counts / top_k (Switch Transformers, pooled over layers)."""
    here = valid[:, None]
    share = top_k / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)  # 1/R
    load = counts.astype(jnp.float32) * share
    value = jnp.sum(_probabilities(logits, here) * load, axis=-1) * (logits.shape[-1] * share)
    return jnp.where(valid, value, 0.0)


def _probabilities(logits: jax.Array, here: jax.Array) -> jax.Array:
    logits = jnp.where(here, logits.astype(jnp.float32), 0.0)
    p = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    return exact_quotient(p, jnp.sum(p, axis=-1, keepdims=True))
