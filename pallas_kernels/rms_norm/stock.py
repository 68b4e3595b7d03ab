"""The native twin: the definition, run by XLA as it is."""

from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.rms_norm import reference


def rms_norm(
    x: Float[Array, "rows width"],
    scale: Float[Array, " width"],
    *,
    eps: float = 1e-6,
    segments: Segments | None = None,
) -> Float[Array, "rows width"]:
    """`reference.rms_norm`, reduced in the order that XLA chooses."""
    del segments
    return reference.rms_norm(x, scale, eps=eps)
