"""Rows of the embedding table."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from isojax.layouts import CHUNK, Segments, round_up
from pallas_kernels.cast import cast
from pallas_kernels.embedding import kernel
from pallas_kernels.embedding.kernel import Schedule


def embed(
    tokens: Int32[Array, " rows"],
    table: Float[Array, "words width"],
    *,
    dtype: DTypeLike,
    segments: Segments | None = None,
    schedule: Schedule = Schedule(),
) -> Float[Array, "rows width"]:
    """The row of `table` for every token, rounded to `dtype`.

    A table that was rounded before gives the same bits. The gradient of `table` is added in float32: a
    chain over the occurrences of a word in each sequence, in row order, and a tree over sequences; then rounded
    to the dtype of `table` (float32: not at all). Its bits depend on the sequences alone.

    Args:
        tokens: A word for every row. A word beyond the table gives a row of NaN: rows that are
            not there need any word of the table, and a zero cotangent.
        table: Float32, or rounded already.
        dtype: Dtype of the result.
        segments: The sequence of every 64 rows, for the gradient; by default one sequence.
        schedule: How the work is cut into blocks.

    Raises:
        ValueError: If `tokens` and `segments` disagree on the number of blocks.
    """
    rows = tokens.shape[0]
    segments = segments or Segments.one(rows)
    blocks = round_up(rows, CHUNK) // CHUNK
    if segments.sequence.shape[0] != blocks:
        raise ValueError(
            f"embed got segments of {segments.sequence.shape[0]} blocks for {rows} rows, which are {blocks} blocks:"
            " pass the segments of the batch"
        )
    return _embed((jnp.dtype(dtype), table.shape[0], table.dtype, schedule), tokens, table, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(static, tokens, table, segments):
    del segments
    return cast(table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False), static[0])


def _forward(static, tokens, table, segments):
    return _embed(static, tokens, table, segments), (tokens, segments)


def _backward(static, residuals, cotangent):
    tokens, segments = residuals
    _, words, dtype, schedule = static
    return None, cast(kernel.table_gradient(tokens, cotangent, words, segments, schedule), dtype), None


_embed.defvjp(_forward, _backward)
