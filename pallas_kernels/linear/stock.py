"""The native twins: XLA's own dots, differentiated by autodiff."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.linear.numerics import Numerics


def column_linear(
    x: Float[Array, "rows inputs"],
    weights: Sequence[Float[Array, "_ inputs"]],
    *,
    out_dtypes: Sequence[DTypeLike | None] | None = None,
    segments: Segments | None = None,
    numerics: Numerics = Numerics(),
) -> tuple[Float[Array, "rows _"], ...]:
    """`x @ weight.T` for each weight, in the order that XLA chooses."""
    del segments, numerics
    dtypes = out_dtypes or [None] * len(weights)
    return tuple(
        jnp.dot(x, w.astype(x.dtype).T, preferred_element_type=dtype or x.dtype)
        for w, dtype in zip(weights, dtypes, strict=True)
    )


def row_linear(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"],
    *,
    segments: Segments | None = None,
    numerics: Numerics = Numerics(),
) -> Float[Array, "rows outputs"]:
    """`x @ weight.T` in the order that XLA chooses."""
    return column_linear(x, (weight,), segments=segments, numerics=numerics)[0]
