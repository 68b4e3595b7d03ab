"""The native twins: values used where they are needed, their cotangents added as autodiff likes."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def fork(x: Float[Array, "rows *shape"], consumers: int = 2) -> tuple[Float[Array, "rows *shape"], ...]:
    """`x` itself for every consumer."""
    return (x,) * consumers


def split(x: Float[Array, "*shape"], sizes: Sequence[int], axis: int = -1) -> tuple[Array, ...]:
    """Pieces of `x` along `axis`."""
    return tuple(jnp.split(x, [sum(sizes[:i]) for i in range(1, len(sizes))], axis=axis))
