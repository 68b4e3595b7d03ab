"""The native twin: the definition, run by XLA as it is."""

from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.gated_norm import reference


def gated_norm(
    o: Float[Array, "rows heads head_dim"],
    z: Float[Array, "rows heads head_dim"],
    scale: Float[Array, " head_dim"],
    *,
    eps: float = 1e-6,
    segments: Segments | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """`reference.gated_norm`, reduced in the order that XLA chooses."""
    del segments
    return reference.gated_norm(o, z, scale, eps=eps)
