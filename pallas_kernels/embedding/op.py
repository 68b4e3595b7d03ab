"""Rows of the embedding table."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from isojax.layouts import CHUNK, Segments, round_up
from pallas_kernels.cast import cast
from pallas_kernels.collectives import from_owners
from pallas_kernels.embedding import kernel
from pallas_kernels.embedding.kernel import Schedule
from pallas_kernels.sharding import AxisName, axis_size, check_pieces, sharded_rows


def embed(
    tokens: Int32[Array, " rows"],
    table: Float[Array, "words width"],
    *,
    dtype: DTypeLike,
    segments: Segments | None = None,
    axis_name: AxisName | None = None,
    scatter_axis: Literal[0] | None = None,
    schedule: Schedule = Schedule(),
) -> Float[Array, "own_rows width"]:
    """The row of `table` for every token, rounded to `dtype`.

    A table that was rounded before gives the same bits. The gradient of `table` is added in float32: a
    chain over the occurrences of a word in each sequence, in row order, and a tree over sequences; then rounded
    to the dtype of `table` (float32: not at all). Its bits depend on the sequences alone.

    Inside `shard_map` with `axis_name` a rank has its run of the words. Rows come from whichever rank has their word;
    nothing is added between ranks.

    Args:
        tokens: A word for every row, on every rank. A word beyond the table gives a row of NaN: rows that are
            not there need any word of the table, and a zero cotangent.
        table: Float32, or rounded already.
        dtype: Dtype of the result.
        segments: The sequence of every 64 rows, for the gradient; by default one sequence.
        axis_name: The mesh axis that words are sharded over, equally many on every rank.
        scatter_axis: 0 to leave every rank its rows of the result; by default all ranks get all rows.
        schedule: How the work is cut into blocks.

    Raises:
        ValueError: If `tokens` and `segments` disagree on the number of blocks, or ranks do not divide the rows that
            are scattered.
    """
    rows = tokens.shape[0]
    segments = segments or Segments.one(rows)
    blocks = round_up(rows, CHUNK) // CHUNK
    if segments.sequence.shape[0] != blocks:
        raise ValueError(
            f"embed got segments of {segments.sequence.shape[0]} blocks for {rows} rows, which are {blocks} blocks:"
            " pass the segments of the batch"
        )
    scatter = sharded_rows("embed", "scatter_axis", scatter_axis, axis_name)
    if scatter:
        check_pieces("embed", rows, "rows", axis_name)
    static = _Static(jnp.dtype(dtype), table.shape[0], table.dtype, schedule, axis_name, scatter)
    return _embed(static, tokens, table, segments)


class _Static(NamedTuple):
    dtype: jnp.dtype
    words: int  # Of this rank.
    table_dtype: jnp.dtype
    schedule: Schedule
    axis_name: AxisName | None
    scatter: bool

    def own(self, tokens: jax.Array) -> jax.Array:
        """Tokens as rows of this rank's table; those of other ranks lie beyond it."""
        return tokens if self.axis_name is None else tokens - lax.axis_index(self.axis_name) * self.words


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(static: _Static, tokens, table, segments):
    del segments
    rows = table.at[static.own(tokens)].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    rows = cast(rows, static.dtype)
    if static.axis_name is None:
        return rows
    owners = jnp.clip(tokens // static.words, 0, axis_size(static.axis_name) - 1)
    return from_owners(rows, owners, static.axis_name, scatter=static.scatter)


def _forward(static, tokens, table, segments):
    return _embed(static, tokens, table, segments), (tokens, segments)


def _backward(static: _Static, residuals, cotangent):
    tokens, segments = residuals
    if static.scatter:
        cotangent = lax.all_gather(cotangent, static.axis_name, tiled=True)
    grad = kernel.table_gradient(static.own(tokens), cotangent, static.words, segments, static.schedule)
    return None, cast(grad, static.table_dtype), None


_embed.defvjp(_forward, _backward)
