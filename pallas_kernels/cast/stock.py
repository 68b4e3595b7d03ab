"""The native twin of `cast`."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float


def cast(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """`x.astype(dtype)`, which XLA may fuse and, down and up again, drop."""
    return x.astype(dtype)
