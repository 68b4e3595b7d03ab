"""Broadcasting and summing an axis inside row functions, each the gradient of the other, in a written order.

A `jnp.sum` inside a kernel keeps its bits only while the whole block keeps its shape: over 1 or 4 local
heads of 32 it differs (measured). These sums meet whole slices in the order of `trees.fold`, so that the
other axes may have any size, and a tensor-parallel rank with fewer heads computes the same bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.region import traced_for
from pallas_kernels.tree_sum import fold_axis


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def spread(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Repeats axis `axis` of `x`, which has size 1, `size` times; the gradient is its `sum_axis`."""
    return jnp.broadcast_to(x, [size if i == axis % x.ndim else n for i, n in enumerate(x.shape)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_axis(x: jax.Array, axis: int) -> jax.Array:
    """Sums `x` over `axis`, which stays with size 1, in tree order; the gradient is its `spread`.

    On a GPU the order is that of `mosaic.layout`: it follows from the size of the axis alone too.
    """
    if traced_for() != "cpu":
        return jnp.sum(x, axis, keepdims=True)
    # The barrier keeps a product that makes `x` from contracting with the first additions.
    return fold_axis(lax.optimization_barrier(x), axis)


spread.defvjp(
    lambda x, axis, size: (spread(x, axis, size), None),
    lambda axis, size, _, grad: (sum_axis(grad, axis),),
)
sum_axis.defvjp(
    lambda x, axis: (sum_axis(x, axis), x.shape[axis]),
    lambda axis, size, grad: (spread(grad, axis, size),),
)
