"""One step of AdamW on one tensor, rounding by rounding."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.elementwise import elementwise, exact_quotient
from pallas_kernels.region import exact_product, region_call


@dataclasses.dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What of AdamW does not change from step to step.

    Attributes:
        b1: Decay of the mean of gradients.
        b2: Decay of the mean of squared gradients.
        eps: Added to the root of the latter.
        weight_decay: Part of a parameter that is subtracted, times the learning rate.
        max_grad_norm: Gradients are scaled down to this global norm; None for never.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


type Factors = Float32[Array, " 4"]
"""What all tensors of a step share: scale of the gradients, both bias corrections, learning rate."""


class Step(NamedTuple):
    """A tensor after a step, or what is to be added to it; and its moments."""

    value: Float32[Array, "*shape"]
    mu: Float32[Array, "*shape"]
    nu: Float32[Array, "*shape"]


def factors(
    count: Int32[Array, ""],
    learning_rate: Float32[Array, ""],
    grad_norm: Float32[Array, ""] | None,
    hyper: Hyperparameters,
) -> Float32[Array, " 4"]:
    """The `Factors` of step `count`, from 1.

    The scale is `max_grad_norm` / `grad_norm` where the norm is not below its maximum, else 1. A norm that is not a
    number makes it, and every parameter, not a number: look at the norm before the step.
    """

    def factors_kernel(count_ref, rate_ref, norm_ref, factors_ref):
        step, norm = count_ref[...].astype(jnp.float32), norm_ref[...]
        limit = jnp.float32(jnp.inf if hyper.max_grad_norm is None else hyper.max_grad_norm)
        scale = jnp.where(norm < limit, 1.0, limit / norm)
        corrections = [1.0 - jnp.float32(b) ** step for b in (hyper.b1, hyper.b2)]
        factors_ref[...] = jnp.concatenate([scale, *corrections, rate_ref[...]])

    norm = jnp.zeros(1, jnp.float32) if grad_norm is None else grad_norm.reshape(1)
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    call = region_call("adamw.factors", factors_kernel, out_shape=shape)
    return call(count.reshape(1), learning_rate.reshape(1), norm)


def adamw_step(
    param: Float32[Array, "*shape"],
    mu: Float32[Array, "*shape"],
    nu: Float32[Array, "*shape"],
    grad: Float32[Array, "*shape"],
    factors: Float32[Array, " 4"],
    hyper: Hyperparameters,
) -> Step:
    """What AdamW adds to `param`, and its new moments. Every product is rounded before it is added to."""
    return _step(False, hyper, param, mu, nu, grad, factors)


def adamw_apply(
    param: Float32[Array, "*shape"],
    mu: Float32[Array, "*shape"],
    nu: Float32[Array, "*shape"],
    grad: Float32[Array, "*shape"],
    factors: Float32[Array, " 4"],
    hyper: Hyperparameters,
) -> Step:
    """`param` after the step, the bits of `param` + `adamw_step(…).value`, and its new moments."""
    return _step(True, hyper, param, mu, nu, grad, factors)


def _step(applied: bool, hyper: Hyperparameters, *arrays) -> Step:
    fn = functools.partial(_block, applied, hyper)
    return Step(*elementwise("adamw", fn, arrays[:4], arrays[4], out_dtypes=[jnp.float32] * 3))


def _block(applied, hyper, param, mu, nu, grad, factors):
    scale, of_mu, of_nu, rate = (factors[i] for i in range(4))
    grad = exact_product(grad, scale)
    b1, b2, part_mu, part_nu = map(jnp.float32, (hyper.b1, hyper.b2, 1 - hyper.b1, 1 - hyper.b2))
    mu = exact_product(b1, mu) + exact_product(part_mu, grad)
    nu = exact_product(b2, nu) + exact_product(part_nu, exact_product(grad, grad))
    root = jnp.sqrt(exact_quotient(nu, of_nu)) + hyper.eps
    direction = exact_quotient(exact_quotient(mu, of_mu), root)
    if hyper.weight_decay:
        direction = direction + exact_product(jnp.float32(hyper.weight_decay), param)
    update = exact_product(-rate, direction)
    return (param + update if applied else update), mu, nu
