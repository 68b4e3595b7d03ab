"""The native twin: the definition, run by XLA as it is."""

from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.norm_rope import reference


def norm_rope(
    x: Float[Array, "rows heads head_dim"],
    scale: Float[Array, " head_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    *,
    eps: float = 1e-6,
    segments: Segments | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """`reference.norm_rope`, reduced in the order that XLA chooses."""
    del segments
    return reference.norm_rope(x, cos, sin, scale, eps=eps)
