"""The native twins: plain arithmetic, which XLA may fuse and contract."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels.adamw.op import Hyperparameters, Step


def adamw_step(
    param: Float32[Array, "*shape"],
    mu: Float32[Array, "*shape"],
    nu: Float32[Array, "*shape"],
    grad: Float32[Array, "*shape"],
    factors: Float32[Array, " 4"],
    hyper: Hyperparameters,
) -> Step:
    """What AdamW adds to `param`, and its new moments."""
    scale, of_mu, of_nu, rate = factors
    grad = grad * scale
    mu = hyper.b1 * mu + (1 - hyper.b1) * grad
    nu = hyper.b2 * nu + (1 - hyper.b2) * grad * grad
    direction = (mu / of_mu) / (jnp.sqrt(nu / of_nu) + hyper.eps) + hyper.weight_decay * param
    return Step(-rate * direction, mu, nu)


def adamw_apply(
    param: Float32[Array, "*shape"],
    mu: Float32[Array, "*shape"],
    nu: Float32[Array, "*shape"],
    grad: Float32[Array, "*shape"],
    factors: Float32[Array, " 4"],
    hyper: Hyperparameters,
) -> Step:
    """`param` after the step, and its new moments."""
    step = adamw_step(param, mu, nu, grad, factors, hyper)
    return step._replace(value=param + step.value)
