"""The full-attention mixer: gated, grouped-query, partially rotated."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from isojax.layouts import CHUNK
from pallas_kernels.binding import Ops
from qwen35_moe.cache import kv_view, write_kv
from qwen35_moe.config import Config
from qwen35_moe.context import Context

type Weights = dict[str, Array]


def attention_mixer(
    weights: Weights,
    x: Float[Array, "rows embed"],
    context: Context,
    pool: Array | None,
    config: Config,
    ops: Ops,
) -> tuple[Float[Array, "rows embed"], Array | None]:
    """Gated attention over a step's rows (docs/model.md).

    Args:
        weights: The layer's `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`.
        x: Normalised rows.
        context: The step, its rotary tables and residency.
        pool: The layer's pool of pages, or None: then keys and values are the step's own.
        config: The model's sizes.
        ops: The bound ops.

    Returns:
        The mixer's output, and the pool with the step's keys and values in it.
    """
    rows, head = x.shape[0], config.head_dim
    query_gate, k, v = ops.column_linear(
        x, (weights["q_proj"], weights["k_proj"], weights["v_proj"]), segments=context.segments
    )
    # Each head's queries and gate lie side by side: [query | gate].
    q, gate = ops.split(query_gate.reshape(rows, -1, 2 * head), (head, head), -1)
    q = _turn(q, weights["q_norm"], context, config, ops)
    k = _turn(k.reshape(rows, -1, head), weights["k_norm"], context, config, ops)
    v = v.reshape(rows, -1, head)
    if pool is None:
        out = _attend_to_itself(q, k, v, context, ops)
    else:
        out, pool = _attend_to_cache(q, k, v, context, pool, config, ops)
    gated = ops.output_gate(out.reshape(rows, -1), gate.reshape(rows, -1))
    return ops.row_linear(gated, weights["o_proj"], segments=context.segments), pool


def _turn(x, scale, context: Context, config: Config, ops: Ops):
    return ops.norm_rope(x, scale, context.cos, context.sin, eps=config.rms_norm_eps, segments=context.segments)


def _attend_to_itself(q, k, v, context: Context, ops: Ops):
    """Every block of the step is a page of its own: the identity page table."""
    chunks = context.step.chunks
    blocks = chunks.index.shape[0]
    in_blocks = lambda y: y.reshape(blocks, CHUNK, *y.shape[1:])  # noqa: E731
    kv = jnp.stack([in_blocks(k), in_blocks(v)], axis=1).swapaxes(2, 3)  # [blocks, 2, heads, 64, head_dim]
    out = ops.attention_chunks(in_blocks(q), kv, identity_pages(context), chunks)
    return out.reshape(q.shape)


def identity_pages(context: Context) -> Int32[Array, "sequences blocks"]:
    """The page table in which page j of a sequence is its j-th block in the step."""
    chunks = context.step.chunks
    blocks = chunks.index.shape[0]
    number = jnp.arange(blocks, dtype=jnp.int32)
    # The block of chunk 0, as each block of the sequence tells it; padding blocks tell nothing.
    first = jnp.where(chunks.end > 0, number - chunks.index, blocks)
    of_sequence = jnp.arange(chunks.num_sequences)[:, None] == chunks.sequence
    first = jnp.min(jnp.where(of_sequence, first, blocks), axis=1)
    return jnp.minimum(first[:, None] + number, blocks - 1)


def _attend_to_cache(q, k, v, context: Context, pool, config: Config, ops: Ops):
    """Writes the step's keys and values to their pages, then attends to the pages."""
    step = context.step
    pages, block_of_row = context.kv_pages, []
    tokens = pool.shape[1] // (2 * config.kv_dim)
    split = step.decode_rows
    page = step.positions // tokens
    if step.decode is not None:
        block_of_row.append(jnp.take_along_axis(pages[0], page[:split, None], axis=1)[:, 0])
    if step.chunks is not None:
        table = pages[1][jnp.repeat(step.chunks.sequence, CHUNK, total_repeat_length=page.shape[0] - split)]
        block_of_row.append(jnp.take_along_axis(table, page[split:, None], axis=1)[:, 0])
    block = jnp.where(step.valid, jnp.concatenate(block_of_row), pool.shape[0])
    pool = write_kv(pool, k, v, block, step.positions % tokens, config)
    kv = kv_view(pool, config)
    out = []
    if step.decode is not None:
        out.append(ops.attention_decode(q[:split], kv, pages[0], step.decode))
    if step.chunks is not None:
        in_blocks = q[split:].reshape(-1, CHUNK, *q.shape[1:])
        out.append(ops.attention_chunks(in_blocks, kv, pages[1], step.chunks).reshape(-1, *q.shape[1:]))
    return jnp.concatenate(out), pool
