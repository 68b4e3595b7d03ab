"""Query and key norm with partial rotary embedding, one region."""

import functools

from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.norm_rope import reference
from pallas_kernels.rows import row_op
from pallas_kernels.share_over_heads import share_over_heads


def norm_rope(
    x: Float[Array, "rows heads head_dim"],
    scale: Float[Array, " head_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
    *,
    eps: float = 1e-6,
    segments: Segments | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """Normalises each head of each row and turns its first 2·half dimensions by the row's position.

    The whole is float32 with one rounding. A row's bits depend on that row alone. The gradient of `scale`
    sums 64-row partials of each head in the order of `share_over_heads`, then `segment_sum`.

    Args:
        x: Queries or keys, bfloat16 or float32.
        scale: Zero-centred scale shared by the heads, float32.
        cos: Cosines of each row's position, float32, from `rotary_tables`.
        sin: Sines, likewise.
        eps: Added to the mean square.
        segments: The sequence of every 64 rows, for the gradient; by default one sequence.

    Raises:
        ValueError: If the tables turn more dimensions than a head has, or are not float32.
    """
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"norm_rope turns {2 * cos.shape[-1]} dimensions of heads of {x.shape[-1]}: check rotary_dim")
    if cos.dtype.name != "float32" or sin.dtype.name != "float32":
        raise ValueError(f"norm_rope takes float32 tables, got {cos.dtype} and {sin.dtype}: use rotary_tables")
    return _op(eps)(x, cos, sin, share_over_heads(scale, x.shape[1]), segments=segments)


@functools.cache
def _op(eps: float):
    return row_op("norm_rope", functools.partial(reference.norm_rope, eps=eps), num_shared=1, constants=(1, 2))
