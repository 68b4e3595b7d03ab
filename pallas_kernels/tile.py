"""Products of tiles inside CPU kernels, each element one ascending chain of fused multiply-adds."""

import jax
import jax.numpy as jnp
from jax import lax

from isojax.layouts import round_up

_MIN_ROWS = 8  # One row takes XLA's matrix-vector path, which sums in another order.
_COLUMNS = 64  # Columns beyond a multiple of 64 get several accumulators, depending on the number of rows.


def dot(a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 1)) -> jax.Array:
    """`a` times `b` over axis `contract[0]` of `a` and `contract[1]` of `b`, in float32.

    Every element is `fma(a[k], b[k], total)` for ascending k from zero, whatever the number of rows
    and columns (tests/pallas_kernels/test_tile.py compares with that chain bit for bit). The summed
    axis has at most 128 entries; longer sums chain several products.

    Args:
        a: Tile of two axes, float32 or bfloat16 (whose products are exact in float32).
        b: Tile of two axes.
        contract: The summed axis of each.
    """
    rows, columns = a.shape[1 - contract[0]], b.shape[1 - contract[1]]
    a = _pad(a.astype(jnp.float32), 1 - contract[0], max(rows, _MIN_ROWS))
    b = _pad(b.astype(jnp.float32), 1 - contract[1], round_up(columns, _COLUMNS))
    out = lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision=lax.Precision.HIGHEST)
    return out[:rows, :columns]


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(2)]) if missing else x
