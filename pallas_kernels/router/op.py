"""Which experts a token goes to, and with which weights."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.router import reference
from pallas_kernels.rows import row_op


def router(
    logits: Float32[Array, "rows experts"], valid: Bool[Array, " rows"], *, top_k: int
) -> tuple[Float32[Array, "rows {top_k}"], Int32[Array, "rows {top_k}"]]:
    """Chooses `top_k` experts for each row: softmax over all, the largest k, renormalised, in float32.

    A row's bits depend on that row alone. Equal probabilities go to the lower expert first. Gradients
    reach `logits` through the weights.

    Args:
        logits: Scores of every expert, float32: selecting from rounded scores flips routes.
        valid: Whether the row is a token. The others may hold anything, NaN included.
        top_k: Experts of a token.

    Returns:
        Weights, and experts in descending order of weight. A row that is not valid has expert
        `experts` (none) and weight zero; one with a NaN has no expert and a NaN weight.

    Raises:
        ValueError: If there are fewer than `top_k` experts.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(
            f"router chooses top_k = {top_k} of {logits.shape[-1]} experts: top_k must be 1 to {logits.shape[-1]}"
        )
    return _router(top_k)(logits, valid)


def router_load(
    experts: Int32[Array, "rows ranks"], valid: Bool[Array, " rows"], num_experts: int
) -> Int32[Array, " {num_experts}"]:
    """How many of the choices of valid rows fell on each expert: integers, which any order adds alike."""
    hits = (experts[..., None] == jnp.arange(num_experts, dtype=jnp.int32)) & valid[:, None, None]
    return jnp.sum(hits, axis=(0, 1), dtype=jnp.int32)


def load_balancing_loss(
    logits: Float32[Array, "rows experts"],
    valid: Bool[Array, " rows"],
    counts: Int32[Array, " experts"],
    *,
    top_k: int,
) -> Float32[Array, " rows"]:
    """Each row's term of the load-balancing loss E · Σ_e f_e · P_e, pooled over layers (docs/model.md).

    The loss is the sum of the terms of all rows of all layers. With R rows in that pool, f_e is
    `counts`_e / R and P_e the mean probability, so uniform routing gives `top_k`. The terms carry the
    1/R; no gradient flows through the counts.

    Args:
        logits: Scores of every expert in one layer.
        valid: Whether the row is a token; the others have term zero.
        counts: `router_load` added over every layer, device and micro-batch of the update.
        top_k: Experts of a token, which makes R of `counts`.
    """
    return _load_balancing_loss(top_k)(logits, valid, counts)


@functools.cache
def _router(top_k: int):
    return row_op("router", functools.partial(reference.router, top_k=top_k))


@functools.cache
def _load_balancing_loss(top_k: int):
    fn = functools.partial(reference.load_balancing_loss, top_k=top_k)
    return row_op("load_balancing_loss", fn, num_shared=1)
