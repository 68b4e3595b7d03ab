"""A rounding, as a region: inside a jit XLA may drop a cast down and up again."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.elementwise import elementwise


def cast(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Rounds `x` to `dtype` (nearest, ties to even); `x` itself if it has that dtype already.

    The cotangent is rounded back to the dtype of `x`.
    """
    dtype = jnp.dtype(dtype)
    return x if x.dtype == dtype else _cast(dtype, x.dtype, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cast(dtype, source, x):
    del source
    return elementwise("cast", lambda block: (block.astype(dtype),), [x], out_dtypes=[dtype])[0]


_cast.defvjp(
    lambda dtype, source, x: (_cast(dtype, source, x), None),
    lambda dtype, source, _, cotangent: (cast(cotangent, source),),
)
