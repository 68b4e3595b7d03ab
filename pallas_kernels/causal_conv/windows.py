"""Which rows stand before and after a block: data movement of the causal convolution."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.step import Chunks

TAPS = 4
HISTORY = TAPS - 1


def present(chunks: Chunks, rows: int) -> Bool[Array, "blocks rows 1"]:
    """Which rows of each block are there."""
    row = jnp.arange(rows)[None, :, None]
    return (row >= chunks.begin[:, None, None]) & (row < chunks.end[:, None, None])


def with_history(
    x: Float[Array, "blocks rows channels"], window: Float[Array, "sequences 3 channels"] | None, chunks: Chunks
) -> Float[Array, "blocks extended channels"]:
    """Each block after the three rows before it: row r of `x` becomes row r + 3, absent rows become zero.

    Before the first row that is there stand the last rows of the block before, if it is of the same sequence;
    else zeros at a sequence's start; else the sequence's window.
    """
    blocks, rows, channels = x.shape
    if window is None:
        window = jnp.zeros((chunks.num_sequences, HISTORY, channels), x.dtype)
    starts = (chunks.index == 0) & (chunks.begin == 0)
    carried = jnp.where(starts[:, None, None], 0, window[chunks.sequence])

    kept = jnp.where(present(chunks, rows), x, 0)
    extended = jnp.concatenate([jnp.zeros((blocks, HISTORY, channels), x.dtype), kept], axis=1)
    row = jnp.arange(rows + HISTORY)[None, :, None] - chunks.begin[:, None, None]
    for i in range(HISTORY):
        extended = jnp.where(row == i, carried[:, i : i + 1], extended)
    # A piece may begin in the last rows of a block: what stands before the next block includes its window.
    before = jnp.concatenate([jnp.zeros_like(extended[:1, -HISTORY:]), extended[:-1, -HISTORY:]])
    before = jnp.where(_same_as_previous(chunks)[:, None, None], before, extended[:, :HISTORY])
    return jnp.concatenate([before, extended[:, HISTORY:]], axis=1)


def last_window(
    extended: Float[Array, "blocks extended channels"],
    window: Float[Array, "sequences 3 channels"] | None,
    chunks: Chunks,
) -> Float[Array, "sequences 3 channels"]:
    """The last three rows of each sequence; `window` (or zeros) for a sequence without a block."""
    mine = (chunks.sequence == jnp.arange(chunks.num_sequences)[:, None]) & (chunks.end > 0)
    last = jnp.max(jnp.where(mine, jnp.arange(extended.shape[0]), -1), axis=1)
    rows = chunks.end[last][:, None] + jnp.arange(HISTORY)
    found = extended[last[:, None], rows]
    return jnp.where((last >= 0)[:, None, None], found, 0 if window is None else window)


def with_following(x: Float[Array, "blocks rows channels"], chunks: Chunks) -> Float[Array, "blocks extended channels"]:
    """Each block before the first three rows of the next block of its sequence, or zeros."""
    after = jnp.concatenate([x[1:, :HISTORY], jnp.zeros_like(x[:1, :HISTORY])])
    continues = jnp.concatenate([_same_as_previous(chunks)[1:], jnp.zeros(1, bool)])
    return jnp.concatenate([x, jnp.where(continues[:, None, None], after, 0)], axis=1)


def _same_as_previous(chunks: Chunks) -> Bool[Array, " blocks"]:
    same = (chunks.sequence[1:] == chunks.sequence[:-1]) & (chunks.end[1:] > 0) & (chunks.end[:-1] > 0)
    return jnp.concatenate([jnp.zeros(1, bool), same])
