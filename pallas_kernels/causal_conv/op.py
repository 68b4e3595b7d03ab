"""The causal convolution before Gated DeltaNet, for blocks of a sequence and for one row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from isojax.layouts import CHUNK, Segments
from pallas_kernels.causal_conv import kernel
from pallas_kernels.causal_conv.windows import last_window, present, with_following, with_history
from pallas_kernels.rows import row_op
from pallas_kernels.segment_sum import segment_sum
from pallas_kernels.step import Chunks


def causal_conv_chunks(
    x: Float[Array, "blocks 64 channels"],
    window: Float[Array, "sequences 3 channels"] | None,
    weight: Float[Array, "channels 4"],
    chunks: Chunks,
    *,
    segments: Segments | None = None,
) -> tuple[Float[Array, "blocks 64 channels"], Float[Array, "sequences 3 channels"]]:
    """y_t = silu(Σ_j weight[:, j] · x_{t−3+j}) along every sequence of a step.

    Float32 with rounded products, taps ascending, one rounding at the end: a row has the same bits here and in
    `causal_conv_decode`, wherever pieces are cut. Rows that are not there are not read and come out zero.
    The gradient of a row is one sum over the rows t … t+3, also across blocks; that of `weight` adds 64 rows in
    tree order and follows `segment_sum`. No gradient flows through windows.

    Args:
        x: Blocks of 64 rows, bfloat16 or float32.
        window: The three rows before the first row of each sequence in this step; zeros by default. A
            sequence that starts here (chunk 0, row 0) has zeros before it whatever its window holds.
        weight: Taps, the last one for the row itself; float32.
        chunks: Which rows are there, and of which sequence.
        segments: The sequence of every block, for the gradient of `weight`; by default that of `chunks`.

    Returns:
        The blocks, and each sequence's last three rows.

    Raises:
        ValueError: If `window` has another dtype than `x`.
    """
    if window is not None and window.dtype != x.dtype:
        raise ValueError(
            f"causal_conv_chunks reads a {x.dtype} window, got {window.dtype}: keep windows as the rows came"
        )
    segments = segments or Segments(chunks.sequence, chunks.num_sequences)
    return _chunks(x, weight, window, chunks, segments)


def causal_conv_decode(
    x: Float[Array, "rows channels"], window: Float[Array, "rows 3 channels"], weight: Float[Array, "channels 4"]
) -> tuple[Float[Array, "rows channels"], Float[Array, "rows 3 channels"]]:
    """The row of `causal_conv_chunks` that follows the three rows of its window, and the new window."""
    return _decode(x, window, weight.T), jnp.concatenate([window[:, 1:], x[:, None]], axis=1)


def _decode_rows(x: jax.Array, window: jax.Array, taps: jax.Array) -> jax.Array:
    rows = [window[:, j] for j in range(window.shape[1])]
    return jax.nn.silu(kernel.convolve([*rows, x], taps)).astype(x.dtype)


_decode = row_op("causal_conv.decode", _decode_rows, num_shared=1)


@jax.custom_vjp
def _chunks(x, weight, window, chunks, segments):
    del segments
    extended = with_history(x, window, chunks)
    y = kernel.forward(extended, weight.T)
    return jnp.where(present(chunks, CHUNK), y, 0), last_window(extended, window, chunks)


def _forward(x, weight, window, chunks, segments):
    return _chunks(x, weight, window, chunks, segments), (x, weight, window, chunks, segments)


def _backward(residuals, grads):
    x, weight, window, chunks, segments = residuals
    there, taps = present(chunks, CHUNK), weight.T
    y_grad = jnp.where(there, grads[0], 0)
    inner, taps_grad = kernel.backward_inner(with_history(x, window, chunks), y_grad, taps)
    x_grad = kernel.backward_outer(with_following(inner, chunks), taps, x.dtype)
    weight_grad = segment_sum(taps_grad.swapaxes(1, 2), segments)
    return jnp.where(there, x_grad, 0), weight_grad, None, None, None


_chunks.defvjp(_forward, _backward)
