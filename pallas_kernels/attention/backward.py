"""Computes the gradient of `attention_chunks` from the log-sum-exp of its scores.

With scores S = scale · Q Kᵀ, probabilities P = exp(S − lse) and D = Σ dO ∘ O (Dao 2023, FlashAttention-2):

    dV = Pᵀ dO,   dS = P ∘ (dO Vᵀ − D),   dQ = scale · dS K,   dK = scale · dSᵀ Q

P and dS are rounded to the compute dtype as operands of a product; sums are float32. KV is cut into
the blocks of 64 tokens that the chunks are, whatever the forward's `kv_block`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32

from isojax import trees
from isojax.layouts import CHUNK
from pallas_kernels.attention.arithmetic import as_operand, lane_sum, product, scaled_scores
from pallas_kernels.attention.kernel import chunk_rows
from pallas_kernels.attention.numerics import Schedule
from pallas_kernels.attention.pool import load_kv
from pallas_kernels.cast import cast
from pallas_kernels.elementwise import elementwise
from pallas_kernels.region import exact_product, region_call
from pallas_kernels.sharding import AxisName
from pallas_kernels.step import Chunks
from pallas_kernels.tree_sum import tree_sum

_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def _score_gradient(queries, keys, values, cotangent, lse, delta, visible, scale: float):
    """P and dS of a tile, float32 `[rows, keys]`; exactly zero where not `visible`."""
    scores = scaled_scores(queries, keys, scale)
    weights = jnp.where(visible, jnp.exp(scores - lse), 0.0)
    return weights, weights * (product(cotangent, values, (1, 1)) - delta)


def query_gradient(
    q: Float[Array, "blocks 64 heads width"],
    kv: Float[Array, "pages 2 kv_heads page_tokens width"],
    kv_pages: Int32[Array, "sequences pages_per_sequence"],
    chunks: Chunks,
    output: Float[Array, "blocks 64 heads width"],
    lse: Float32[Array, "blocks 64 heads"],
    cotangent: Float[Array, "blocks 64 heads width"],
    scale: float,
    schedule: Schedule,
) -> tuple[Float[Array, "blocks 64 heads width"], Float32[Array, "blocks 64 heads"]]:
    """Computes dQ, a chain over the KV blocks from the first, and D, which dK needs too."""
    blocks, _, query_heads, width = q.shape
    group = query_heads // kv.shape[2]
    heads = math.gcd(group, schedule.heads)

    def query_gradient_kernel(
        sequence_ref,  # [blocks]
        index_ref,  # [blocks]
        begin_ref,  # [blocks]
        end_ref,  # [blocks]
        pages_ref,  # [sequences, pages_per_sequence]
        kv_ref,  # [pages, 2, kv_heads, page_tokens, width]
        q_ref,  # [1, 64, heads, width]
        output_ref,  # [1, 64, heads, width]
        lse_ref,  # [1, 64, heads]
        cotangent_ref,  # [1, 64, heads, width]
        gradient_ref,  # [1, 64, heads, width]
        delta_ref,  # [1, 64, heads]
    ):
        block, head = pl.program_id(0), pl.program_id(1) * heads // group
        sequence, index, begin, end = (ref[block] for ref in (sequence_ref, index_ref, begin_ref, end_ref))
        rows = chunk_rows(heads)
        is_there = (begin <= rows) & (rows < end)

        def load_rows(ref):
            return jnp.where(is_there, ref[0].reshape(CHUNK * heads, width).astype(jnp.float32), 0.0)

        queries, cotangent = load_rows(q_ref), load_rows(cotangent_ref)
        lse = lse_ref[0].reshape(CHUNK * heads, 1)
        delta = lane_sum(exact_product(cotangent, load_rows(output_ref)))

        def add_block(kv_block, gradient):
            live = index * CHUNK + end
            keys, values = load_kv(kv_ref, pages_ref, sequence, head, kv_block, CHUNK, live, q.dtype)
            columns = kv_block * CHUNK + lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1)
            visible = is_there & (columns <= index * CHUNK + rows)
            _, slope = _score_gradient(queries, keys, values, cotangent, lse, delta, visible, scale)
            return gradient + product(as_operand(slope, q.dtype), keys)

        num_blocks = jnp.where(begin < end, index + 1, 0)
        total = lax.fori_loop(0, num_blocks, add_block, jnp.zeros((CHUNK * heads, width), jnp.float32))
        gradient_ref[0] = (total * scale).astype(q.dtype).reshape(CHUNK, heads, width)
        delta_ref[0] = delta.reshape(CHUNK, heads)

    tile = pl.BlockSpec((1, CHUNK, heads, width), lambda i, h: (i, 0, h, 0))
    column = pl.BlockSpec((1, CHUNK, heads), lambda i, h: (i, 0, h))
    return region_call(
        "attention.backward.query",
        query_gradient_kernel,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)],
        grid=(blocks, query_heads // heads),
        in_specs=[_WHOLE] * 6 + [tile, tile, column, tile],
        out_specs=[tile, column],
    )(chunks.sequence, chunks.index, chunks.begin, chunks.end, kv_pages, kv, q, output, lse, cotangent)


def kv_gradient(
    q: Float[Array, "blocks 64 heads width"],
    kv: Float[Array, "pages 2 kv_heads page_tokens width"],
    kv_pages: Int32[Array, "sequences pages_per_sequence"],
    chunks: Chunks,
    lse: Float32[Array, "blocks 64 heads"],
    delta: Float32[Array, "blocks 64 heads"],
    cotangent: Float[Array, "blocks 64 heads width"],
    scale: float,
    axis_name: AxisName | None = None,
) -> Float[Array, "pages 2 kv_heads page_tokens width"]:
    """Computes dK and dV page by page: a chain over query blocks in every query head, a tree over heads.

    With `axis_name` a rank has some of the query heads: a subtree.
    """
    if axis_name is not None:
        sums = tree_sum(
            _kv_sums(q, kv, kv_pages, chunks, lse, delta, cotangent, scale, is_whole=False)[None],
            axis_name=axis_name,
        )
        return _scaled(scale, sums, kv.dtype)
    return _kv_sums(q, kv, kv_pages, chunks, lse, delta, cotangent, scale, is_whole=True)


def _scaled(scale: float, sums: Float32[Array, "pages 2 kv_heads page_tokens width"], dtype):
    """The last step of `kv_gradient`, for sums that met over ranks."""
    key_sum, value_sum = jnp.unstack(sums, axis=1)
    (of_keys,) = elementwise(
        "attention.backward.kv", lambda x: ((x * scale).astype(dtype),), [key_sum], out_dtypes=[dtype]
    )
    return jnp.stack([of_keys, cast(value_sum, dtype)], axis=1)


def _kv_sums(q, kv, kv_pages, chunks: Chunks, lse, delta, cotangent, scale: float, *, is_whole: bool):
    """`kv_gradient` on one device; if not `is_whole` the sums over the heads here, neither scaled nor rounded."""
    dtype = kv.dtype if is_whole else jnp.dtype("float32")
    pages, _, kv_heads, page_tokens, width = kv.shape
    group = q.shape[2] // kv_heads
    readers = _readers(kv_pages, chunks, pages, page_tokens // CHUNK)

    def kv_gradient_kernel(
        first_ref,  # [pages, blocks_per_page]: position of the first token
        live_ref,  # [pages, blocks_per_page]
        start_ref,  # [pages, blocks_per_page]
        stop_ref,  # [pages, blocks_per_page]
        owners_ref,  # [pages, blocks_per_page]
        index_ref,  # [blocks]
        begin_ref,  # [blocks]
        end_ref,  # [blocks]
        q_ref,  # [blocks, 64, heads, width]
        lse_ref,  # [blocks, 64, heads]
        delta_ref,  # [blocks, 64, heads]
        cotangent_ref,  # [blocks, 64, heads, width]
        kv_ref,  # [1, 2, 1, 64, width]
        gradient_ref,  # [1, 2, 1, 64, width]
    ):
        page, kv_head, slot = (pl.program_id(axis) for axis in range(3))
        first, start, stop = (ref[page, slot] for ref in (first_ref, start_ref, stop_ref))
        rows = chunk_rows(1)
        is_live = first + rows < live_ref[page, slot]
        keys, values = (jnp.where(is_live, kv_ref[0, side, 0].astype(jnp.float32), 0.0) for side in range(2))
        columns = first + lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1)

        def of_head(query_head):
            head = kv_head * group + query_head

            def add_block(block, sums):
                is_there = (begin_ref[block] <= rows) & (rows < end_ref[block])
                visible = is_there & (columns <= index_ref[block] * CHUNK + rows)
                queries, cotangent = (
                    jnp.where(is_there, ref[block, :, head, :].astype(jnp.float32), 0.0)
                    for ref in (q_ref, cotangent_ref)
                )
                lse, delta = (ref[block, :, head].reshape(CHUNK, 1) for ref in (lse_ref, delta_ref))
                weights, slope = _score_gradient(queries, keys, values, cotangent, lse, delta, visible, scale)
                key_term = product(as_operand(slope, kv.dtype), queries, (0, 0))
                value_term = product(as_operand(weights, kv.dtype), cotangent, (0, 0))
                return sums[0] + key_term, sums[1] + value_term

            return lax.fori_loop(start, stop, add_block, (jnp.zeros((CHUNK, width), jnp.float32),) * 2)

        of_keys, of_values = lax.map(of_head, jnp.arange(group))
        undefined = owners_ref[page, slot] > 1
        key_sum, value_sum = (trees.fold(jnp.add, list(terms)) for terms in (of_keys, of_values))
        for side, total in enumerate((key_sum * scale if is_whole else key_sum, value_sum)):
            gradient_ref[0, side, 0] = jnp.where(undefined, jnp.nan, total).astype(dtype)

    tile = pl.BlockSpec((1, 2, 1, CHUNK, width), lambda page, head, slot: (page, 0, head, slot, 0))
    return region_call(
        "attention.backward.kv",
        kv_gradient_kernel,
        out_shape=jax.ShapeDtypeStruct(kv.shape, dtype),
        grid=(pages, kv_heads, page_tokens // CHUNK),
        in_specs=[_WHOLE] * 12 + [tile],
        out_specs=tile,
    )(*readers, chunks.index, chunks.begin, chunks.end, q, lse, delta, cotangent, kv)


def _readers(kv_pages, chunks: Chunks, pages: int, blocks_per_page: int) -> tuple[Int32[Array, "pages blocks"], ...]:
    """Which query blocks read each 64-token block of the pool; integer work.

    Returns:
        For every page and block of it: the position of its first token in the sequence that owns it,
        the number of live tokens of that sequence, the first query block that reads it and one past
        the last, and how many sequences own it. A block without owner has no readers.
    """
    sequences, slots = kv_pages.shape
    blocks = jnp.arange(chunks.index.shape[0], dtype=jnp.int32)
    sequence = jnp.where(chunks.begin < chunks.end, chunks.sequence, sequences)  # Padding falls off the tables.
    start = jnp.full(sequences, len(blocks), jnp.int32).at[sequence].min(blocks, mode="drop")
    stop = jnp.zeros(sequences, jnp.int32).at[sequence].max(blocks + 1, mode="drop")
    last = stop - 1
    live = jnp.where(stop > 0, chunks.index[last] * CHUNK + chunks.end[last], 0)

    kv_blocks = jnp.arange(slots * blocks_per_page, dtype=jnp.int32)
    page = jnp.repeat(kv_pages, blocks_per_page, axis=1)
    page = jnp.where(kv_blocks * CHUNK < live[:, None], page, pages)  # Dead entries may name any page.
    place = page, jnp.broadcast_to(kv_blocks % blocks_per_page, page.shape)
    skipped = jnp.maximum(kv_blocks - chunks.index[start][:, None], 0)  # Earlier queries do not see the block.

    def table(values):
        values = jnp.broadcast_to(values, page.shape)
        return jnp.zeros((pages, blocks_per_page), jnp.int32).at[place].set(values, mode="drop")

    owners = jnp.zeros((pages, blocks_per_page), jnp.int32).at[place].add(1, mode="drop")
    return (
        table(kv_blocks * CHUNK),
        table(live[:, None]),
        table(start[:, None] + skipped),
        table(stop[:, None]),
        owners,
    )
