"""The native twin: the definition, run by XLA as it is."""

from jaxtyping import Array, Float, Float32

from isojax.layouts import Segments
from pallas_kernels.gdn_gates import reference


def gdn_gates(
    a: Float[Array, "rows heads"],
    b: Float[Array, "rows heads"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    *,
    segments: Segments | None = None,
) -> tuple[Float32[Array, "rows heads"], Float32[Array, "rows heads"]]:
    """`reference.gdn_gates`, summed over rows in its gradient as XLA chooses."""
    del segments
    return reference.gdn_gates(a, b, A_log, dt_bias)
