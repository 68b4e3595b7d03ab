"""Computes attention over paged KV: 64-row blocks of queries, or one query at a time."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32

from isojax.layouts import CHUNK
from pallas_kernels.attention.arithmetic import as_operand, lane_sum, product, scaled_scores
from pallas_kernels.attention.numerics import Numerics, Schedule
from pallas_kernels.attention.pool import KV, load_kv
from pallas_kernels.elementwise import exact_quotient
from pallas_kernels.region import exact_product, region_call
from pallas_kernels.step import Chunks, Decode

_WHOLE = pl.BlockSpec(memory_space=pl.ANY)  # Read where it lies: the pool is never copied.


def _softmax_chain(
    queries: Float32[Array, "rows width"],
    positions: Int32[Array, "rows 1"],
    load: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    num_blocks: jax.Array,
    scale: float,
    dtype: jnp.dtype,
    numerics: Numerics,
) -> tuple[Float32[Array, "rows 1"], Float32[Array, "rows 1"], Float32[Array, "rows width"]]:
    """Attends from the rows of a tile to the first `num_blocks` KV blocks of their sequence.

    Rows do not meet: what is computed for a row that is not there may be anything, and is to be dropped.

    Args:
        queries: Of one sequence and one KV head.
        positions: A row sees the tokens up to its own position. A block that it does not see leaves its
            state as it was, bit for bit.
        load: Gives keys and values of a KV block, float32 `[kv_block, width]`.
        num_blocks: How many, traced.
        scale: Of the scores.
        dtype: The compute dtype, which weights are rounded to as operands.
        numerics: Blocks and splits.

    Returns:
        Of each row the highest score, the sum of exponentials and the output before its division by that sum.
    """
    rows, width = queries.shape
    blocks_per_split = numerics.kv_split // numerics.kv_block
    columns = lax.broadcasted_iota(jnp.int32, (1, numerics.kv_block), 1)
    nothing = (
        jnp.full((rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )

    def add_block(block, state):
        highest, total, output = state
        keys, values = load(block)
        visible = block * numerics.kv_block + columns <= positions
        scores = jnp.where(visible, scaled_scores(queries, keys, scale), -jnp.inf)
        top = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - top), jnp.exp(highest - top)
        total = exact_product(total, shrink) + lane_sum(weights)
        return top, total, exact_product(output, shrink) + product(as_operand(weights, dtype), values)

    def add_split(split, state):
        first = split * blocks_per_split
        part = lax.fori_loop(first, jnp.minimum(first + blocks_per_split, num_blocks), add_block, nothing)
        top = jnp.maximum(state[0], part[0])
        old, new = jnp.exp(state[0] - top), jnp.exp(part[0] - top)
        total, output = (exact_product(state[i], old) + exact_product(part[i], new) for i in (1, 2))
        return top, total, output

    return lax.fori_loop(0, pl.cdiv(num_blocks, blocks_per_split), add_split, nothing)


def attention_chunks(
    q: Float[Array, "blocks 64 heads width"],
    kv: KV,
    kv_pages: Int32[Array, "sequences pages_per_sequence"],
    chunks: Chunks,
    scale: float,
    numerics: Numerics,
    schedule: Schedule,
) -> tuple[Float[Array, "blocks 64 heads width"], Float32[Array, "blocks 64 heads"]]:
    """Computes attention and the log-sum-exp of its scores, a few heads of one block per program."""
    blocks, _, query_heads, width = q.shape
    group = query_heads // kv.shape[2]
    heads = math.gcd(group, schedule.heads)

    def attention_chunks_kernel(
        sequence_ref,  # [blocks]
        index_ref,  # [blocks]
        begin_ref,  # [blocks]
        end_ref,  # [blocks]
        pages_ref,  # [sequences, pages_per_sequence]
        kv_ref,  # [pages, 2, kv_heads, page_tokens, width]
        q_ref,  # [1, 64, heads, width]
        output_ref,  # [1, 64, heads, width]
        lse_ref,  # [1, 64, heads]
    ):
        block, kv_head = pl.program_id(0), pl.program_id(1) * heads // group
        sequence, begin, end = sequence_ref[block], begin_ref[block], end_ref[block]
        first = index_ref[block] * CHUNK
        rows = chunk_rows(heads)
        is_there = (begin <= rows) & (rows < end)

        def load(kv_block):
            return load_kv(kv_ref, pages_ref, sequence, kv_head, kv_block, numerics.kv_block, first + end, q.dtype)

        queries = q_ref[0].reshape(CHUNK * heads, width).astype(jnp.float32)
        num_blocks = jnp.where(begin < end, pl.cdiv(first + end, numerics.kv_block), 0)
        highest, total, output = _softmax_chain(queries, first + rows, load, num_blocks, scale, q.dtype, numerics)
        output = jnp.where(is_there, exact_quotient(output, total), 0.0)
        output_ref[0] = output.astype(q.dtype).reshape(CHUNK, heads, width)
        lse_ref[0] = jnp.where(is_there, highest + jnp.log(total), 0.0).reshape(CHUNK, heads)

    tile = pl.BlockSpec((1, CHUNK, heads, width), lambda i, h: (i, 0, h, 0))
    return region_call(
        "attention",
        attention_chunks_kernel,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)],
        grid=(blocks, query_heads // heads),
        in_specs=[_WHOLE] * 6 + [tile],
        out_specs=[tile, pl.BlockSpec((1, CHUNK, heads), lambda i, h: (i, 0, h))],
    )(chunks.sequence, chunks.index, chunks.begin, chunks.end, kv_pages, kv, q)


def attention_decode(
    q: Float[Array, "rows heads width"],
    kv: KV,
    kv_pages: Int32[Array, "rows pages_per_sequence"],
    decode: Decode,
    scale: float,
    numerics: Numerics,
) -> Float[Array, "rows heads width"]:
    """Computes attention of one row a sequence, the query heads of one KV head per program."""
    count, query_heads, width = q.shape
    kv_heads = kv.shape[2]
    group = query_heads // kv_heads

    def attention_decode_kernel(
        position_ref,  # [rows]
        valid_ref,  # [rows]
        pages_ref,  # [rows, pages_per_sequence]
        kv_ref,  # [pages, 2, kv_heads, page_tokens, width]
        q_ref,  # [1, group, width]
        output_ref,  # [1, group, width]
    ):
        row, kv_head = pl.program_id(0), pl.program_id(1)
        position, valid = position_ref[row], valid_ref[row]

        def load(kv_block):
            return load_kv(kv_ref, pages_ref, row, kv_head, kv_block, numerics.kv_block, position + 1, q.dtype)

        queries = q_ref[0].astype(jnp.float32)
        num_blocks = jnp.where(valid, pl.cdiv(position + 1, numerics.kv_block), 0)
        positions = jnp.full((group, 1), position)
        _, total, output = _softmax_chain(queries, positions, load, num_blocks, scale, q.dtype, numerics)
        output_ref[0] = jnp.where(valid, exact_quotient(output, total), 0.0).astype(q.dtype)

    tile = pl.BlockSpec((1, group, width), lambda i, h: (i, h, 0))
    return region_call(
        "attention",
        attention_decode_kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(count, kv_heads),
        in_specs=[_WHOLE] * 4 + [tile],
        out_specs=tile,
    )(decode.position, decode.valid, kv_pages, kv, q)


def chunk_rows(heads: int) -> jax.Array:
    """Which row of its chunk each row of a `[64 · heads, width]` tile is, `[64 · heads, 1]`."""
    return lax.broadcasted_iota(jnp.int32, (CHUNK * heads, 1), 0) // heads
