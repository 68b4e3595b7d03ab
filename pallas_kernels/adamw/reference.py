"""The definition of an AdamW step (Loshchilov & Hutter 2019; Kingma & Ba 2015)."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def adamw(
    param: Float[Array, "*shape"],
    mu: Float[Array, "*shape"],
    nu: Float[Array, "*shape"],
    grad: Float[Array, "*shape"],
    *,
    count: int,
    learning_rate: float,
    scale: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Parameter and moments after step `count` (from 1), `grad` times `scale` being the clipped gradient."""
    grad = grad * scale
    mu = b1 * mu + (1 - b1) * grad
    nu = b2 * nu + (1 - b2) * grad * grad
    direction = (mu / (1 - b1**count)) / (jnp.sqrt(nu / (1 - b2**count)) + eps) + weight_decay * param
    return param - learning_rate * direction, mu, nu
