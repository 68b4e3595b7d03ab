"""Decay and writing strength of Gated DeltaNet."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from isojax.layouts import Segments, round_up
from pallas_kernels.gdn_gates import reference
from pallas_kernels.rows import row_op
from pallas_kernels.spread import spread

_LANES = 8  # With 3, 5 or 7 heads XLA's `exp` depends on the number of rows (measured): whole vectors do not.


def gdn_gates(
    a: Float[Array, "rows heads"],
    b: Float[Array, "rows heads"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    *,
    segments: Segments | None = None,
) -> tuple[Float32[Array, "rows heads"], Float32[Array, "rows heads"]]:
    """The log decay g = −exp(A_log) · softplus(a + dt_bias) and β = sigmoid(b) of every row and value head.

    Bits of a row and head depend on their inputs alone. The gradients of `A_log` and `dt_bias` add 64 rows in
    tree order, then follow `segment_sum`.

    Args:
        a: Input of the decay, bfloat16 or float32.
        b: Input of the writing strength.
        A_log: Logarithm of the decay rate, float32.
        dt_bias: Added to `a`, float32.
        segments: The sequence of every 64 rows, for gradients; by default one sequence.

    Returns:
        g and β in float32, unrounded.
    """
    heads = a.shape[1]
    padded = round_up(heads, _LANES) - heads
    a, b = (jnp.pad(x, ((0, 0), (0, padded))) for x in (a, b))
    A_log, dt_bias = (jnp.pad(x, (0, padded)) for x in (A_log, dt_bias))
    g, beta = _op(a, b, A_log, dt_bias, segments=segments)
    return g[:, :heads], beta[:, :heads]


def _rows(a: jax.Array, b: jax.Array, A_log: jax.Array, dt_bias: jax.Array):
    return reference.gdn_gates(a, b, *(spread(w[None], 0, a.shape[0]) for w in (A_log, dt_bias)))


_op = row_op("gdn_gates", _rows, num_shared=2)
