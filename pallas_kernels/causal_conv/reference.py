"""The definition of the causal convolution (depthwise, four taps, then SiLU; Qwen3-Next)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.causal_conv.windows import TAPS, last_window, present, with_history
from pallas_kernels.step import Chunks


def causal_conv(
    extended: Float[Array, "*blocks extended channels"], weight: Float[Array, "channels 4"]
) -> Float[Array, "*blocks rows channels"]:
    """silu(Σ_j weight[:, j] · extended[row + j]) in float32, rounded once; tap 3 meets the row itself."""
    rows = extended.shape[-2] - (TAPS - 1)
    wide = extended.astype(jnp.float32)
    total = sum(wide[..., j : j + rows, :] * weight[:, j].astype(jnp.float32) for j in range(TAPS))
    return jax.nn.silu(total).astype(extended.dtype)


def causal_conv_chunks(
    x: Float[Array, "blocks rows channels"],
    window: Float[Array, "sequences 3 channels"] | None,
    weight: Float[Array, "channels 4"],
    chunks: Chunks,
    *,
    segments: Segments | None = None,
) -> tuple[Float[Array, "blocks rows channels"], Float[Array, "sequences 3 channels"]]:
    """`causal_conv` of each sequence's rows, and its new window; rows that are absent are zero."""
    del segments
    extended = with_history(x, window, chunks)
    y = jnp.where(present(chunks, x.shape[1]), causal_conv(extended, weight), 0)
    return y, jax.lax.stop_gradient(last_window(extended, window, chunks))


def causal_conv_decode(
    x: Float[Array, "rows channels"], window: Float[Array, "rows 3 channels"], weight: Float[Array, "channels 4"]
) -> tuple[Float[Array, "rows channels"], Float[Array, "rows 3 channels"]]:
    """`causal_conv` of one row each after the three rows in its window, and the new window."""
    extended = jnp.concatenate([window, x[:, None]], axis=1)
    return causal_conv(extended, weight)[:, 0], extended[:, 1:]
