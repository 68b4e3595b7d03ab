"""AdamW, as a class of its own and as an optax transformation."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float32, Int32

from pallas_kernels.adamw import Hyperparameters, adamw_apply, adamw_step, factors
from pallas_kernels.global_norm import global_norm
from pallas_kernels.region import region_call

type Schedule = Callable[[Int32[Array, ""]], Any]
"""A learning rate by the number of steps taken, as in optax."""

_GROUP = 1 << 20  # Elements up to which small tensors are joined; larger ones are never copied.


class AdamWState(NamedTuple):
    """What AdamW remembers.

    Attributes:
        count: Steps taken.
        mu: Decayed mean of gradients, a tree like the parameters.
        nu: Decayed mean of squared gradients.
    """

    count: Int32[Array, ""]
    mu: Any
    nu: Any


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay and clipping by global norm, entirely inside regions.

    A new parameter is its old one plus −learning_rate · (m̂/(√v̂ + eps) + weight_decay · parameter), each operation
    rounded once to float32. Its bits depend on that element, its moments, its gradient, the step and the global norm
    alone; sharding, donation and the program around it change none.

    Attributes:
        learning_rate: A number, or an optax schedule, which is evaluated inside a region too.
        b1: Decay of the mean of gradients.
        b2: Decay of the mean of squared gradients.
        eps: Added to the root of the latter.
        weight_decay: Part of each parameter subtracted, times the learning rate.
        max_grad_norm: Gradients are scaled down to this global norm; None for never.
    """

    learning_rate: float | Schedule
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def init(self, params: Any) -> AdamWState:
        """The state before the first step.

        Raises:
            ValueError: If a parameter is not float32: small steps vanish in a bfloat16 parameter.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if leaf.dtype != jnp.float32:
                raise ValueError(
                    f"AdamW updates float32 parameters, got {leaf.dtype} for {jax.tree_util.keystr(path)}:"
                    " keep parameters in float32 and cast them where they are used"
                )
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamWState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, params))

    def update(
        self, params: Any, grads: Any, state: AdamWState, *, grad_norm: Float32[Array, ""] | None = None
    ) -> tuple[Any, AdamWState]:
        """Parameters and state after a step.

        Args:
            params: Float32 parameters.
            grads: Their gradients, a tree like them.
            state: From `init` or the last step.
            grad_norm: `global_norm(grads)` where it is known, and where `grads` are shards.
        """
        return _each(self, adamw_apply, params, grads, state, grad_norm)

    def updates(
        self, params: Any, grads: Any, state: AdamWState, *, grad_norm: Float32[Array, ""] | None = None
    ) -> tuple[Any, AdamWState]:
        """As `update`, with what is to be added to the parameters in place of the new ones.

        That addition is one rounding of two float32 numbers, which no program can do otherwise: its result has the
        bits of `update`.
        """
        return _each(self, adamw_step, params, grads, state, grad_norm)

    def _factors(self, grads, count: Int32[Array, ""], grad_norm, hyper: Hyperparameters) -> Float32[Array, " 4"]:
        if grad_norm is None and self.max_grad_norm is not None:
            grad_norm = global_norm(grads)
        return factors(count + 1, self._rate(count), grad_norm, hyper)

    def _rate(self, count: Int32[Array, ""]) -> Float32[Array, ""]:
        if not callable(self.learning_rate):
            return jnp.float32(self.learning_rate)
        schedule = jax.make_jaxpr(self.learning_rate)(count)
        constants = [jnp.asarray(c) for c in schedule.consts]

        def learning_rate_kernel(count_ref, *refs):
            values = [ref[...].reshape(c.shape) for ref, c in zip(refs, constants, strict=False)]
            (rate,) = jaxpr_as_fun(ClosedJaxpr(schedule.jaxpr, values))(count_ref[0])
            refs[-1][...] = jnp.asarray(rate, jnp.float32).reshape(1)

        shape = jax.ShapeDtypeStruct((1,), jnp.float32)
        call = region_call("adamw.learning_rate", learning_rate_kernel, out_shape=shape)
        return call(count.reshape(1), *(c.reshape(-1) for c in constants))[0]


# Compiled once for a tree of shapes, also where it is called step by step outside a jit.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _each(optimizer: AdamW, step, params, grads, state: AdamWState, grad_norm):
    hyper = Hyperparameters(optimizer.b1, optimizer.b2, optimizer.eps, optimizer.weight_decay, optimizer.max_grad_norm)
    common = optimizer._factors(grads, state.count, grad_norm, hyper)
    leaves, structure = jax.tree.flatten(params)
    columns = [leaves, *(structure.flatten_up_to(tree) for tree in (state.mu, state.nu, grads))]
    stepped = [[None] * len(leaves) for _ in range(3)]
    for members in _groups([leaf.size for leaf in leaves]):
        results = step(*(_joined([column[i] for i in members]) for column in columns), common, hyper)
        for column, result in zip(stepped, results, strict=True):
            for i, piece in zip(members, _parted(result, [leaves[i].shape for i in members]), strict=True):
                column[i] = piece
    values, mu, nu = map(structure.unflatten, stepped)
    return values, AdamWState(state.count + 1, mu, nu)


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Which leaves share a region: an element's bits do not depend on its place, and a region costs time to compile."""
    groups: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        if groups[-1] and sum(sizes[i] for i in groups[-1]) + size > _GROUP:
            groups.append([])
        groups[-1].append(index)
    return groups if sizes else []


def _joined(tensors: Sequence[jax.Array]) -> jax.Array:
    return tensors[0] if len(tensors) == 1 else jnp.concatenate([x.reshape(-1) for x in tensors])


def _parted(joined: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    if len(shapes) == 1:
        return [joined]
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    pieces = zip([0, *ends], ends, shapes, strict=False)
    return [joined[start:end].reshape(shape) for start, end, shape in pieces]


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`AdamW` for `flax.nnx.Optimizer`, `optax.chain` and whatever else takes an optax transformation.

    The updates it returns are computed inside regions; `optax.apply_updates` then adds each to its float32
    parameter, which gives the bits of `AdamW.update`. Their bits are the same in every layout as long as the
    gradients are; a transformation chained before it has to see to that itself.

    Args: as the attributes of `AdamW`.

    Returns:
        A transformation whose `update` also takes `grad_norm`, the `global_norm` of the gradients where it is known.
    """
    optimizer = AdamW(learning_rate, b1, b2, eps, weight_decay, max_grad_norm)

    def update(grads, state, params=None, *, grad_norm=None, **extra):
        del extra
        if params is None:
            raise ValueError("adamw needs the parameters: call update(grads, state, params)")
        return optimizer.updates(params, grads, state, grad_norm=grad_norm)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
