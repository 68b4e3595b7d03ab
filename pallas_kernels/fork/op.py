"""What autodiff would otherwise add behind one's back: fan-outs and splits."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from isojax import trees
from pallas_kernels.rows import row_op


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fork(x: Float[Array, "rows *shape"], consumers: int = 2) -> tuple[Float[Array, "rows *shape"], ...]:
    """Hands `x` to several consumers, whose cotangents are added in consumer order.

    Without it autodiff inserts `add_any`, in an order that follows from tracing. Here the sum is a
    float32 chain, rounded once to the dtype of `x`.
    """
    return (x,) * consumers


def _add_in_order(*cotangents: jax.Array) -> jax.Array:
    return trees.chain(jnp.add, [c.astype(jnp.float32) for c in cotangents]).astype(cotangents[0].dtype)


_sum_cotangents = row_op("fork.backward", _add_in_order)

fork.defvjp(
    lambda x, consumers: ((x,) * consumers, None),
    lambda consumers, _, cotangents: (_sum_cotangents(*cotangents),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def split(x: Float[Array, "*shape"], sizes: Sequence[int], axis: int = -1) -> tuple[Array, ...]:
    """Cuts `x` along `axis` into pieces of `sizes`; the backward joins them and adds nothing."""
    edges = [sum(sizes[:i]) for i in range(1, len(sizes))]
    return tuple(jnp.split(x, edges, axis=axis))


split.defvjp(
    lambda x, sizes, axis: (split(x, sizes, axis), None),
    lambda sizes, axis, _, pieces: (jnp.concatenate(pieces, axis=axis),),
)
