"""The definition of attention: dense softmax over the gathered tokens of a sequence (Vaswani et al. 2017)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from isojax.layouts import CHUNK
from pallas_kernels.attention.pool import KV
from pallas_kernels.step import Chunks, Decode

_BLOCKS = 16


def attention_chunks(
    q: Float[Array, "blocks 64 heads width"],
    kv: KV,
    kv_pages: Int32[Array, "sequences pages_per_sequence"],
    chunks: Chunks,
    *,
    scale: float | None = None,
) -> Float[Array, "blocks 64 heads width"]:
    """softmax(scale · q kᵀ) v over the tokens up to each row's own; rows that are not there are zero.

    Query head h reads KV head h // (heads // kv_heads). Scores, softmax and sums are in float32, or float64
    where the operands are. Blocks run a few at a time, so that memory is their scores.
    """
    keys, values = _gather(kv, kv_pages, q.dtype)

    @jax.checkpoint
    def of_block(block):
        q, sequence, index, begin, end = block
        rows = jnp.arange(CHUNK)
        positions = jnp.where((begin <= rows) & (rows < end), CHUNK * index + rows, -1)
        return _attend(q, keys[sequence], values[sequence], positions, scale)

    return lax.map(of_block, (q, chunks.sequence, chunks.index, chunks.begin, chunks.end), batch_size=_BLOCKS)


def attention_decode(
    q: Float[Array, "rows heads width"],
    kv: KV,
    kv_pages: Int32[Array, "rows pages_per_sequence"],
    decode: Decode,
    *,
    scale: float | None = None,
) -> Float[Array, "rows heads width"]:
    """`attention_chunks` for one row of each sequence."""
    keys, values = _gather(kv, kv_pages, q.dtype)
    positions = jnp.where(decode.valid, decode.position, -1)

    def of_row(q, keys, values, position):
        return _attend(q[None], keys, values, position[None], scale)[0]

    return jax.vmap(of_row)(q, keys, values, positions)


def _gather(kv, kv_pages, dtype):
    """Keys and values of every sequence, `[sequences, tokens, kv_heads, width]`."""
    if jnp.issubdtype(kv.dtype, jnp.integer):
        kv = lax.bitcast_convert_type(kv, dtype)
    sequences, slots = kv_pages.shape
    _, _, kv_heads, page_tokens, width = kv.shape
    sides = jnp.moveaxis(kv[kv_pages], 2, 0)  # [2, sequences, slots, kv_heads, page_tokens, width]
    return jnp.swapaxes(sides, 3, 4).reshape(2, sequences, slots * page_tokens, kv_heads, width)


def _attend(q, keys, values, positions, scale):
    """Rows `[rows, heads, width]` at `positions` (−1: not there) over the tokens of one sequence."""
    rows, heads, width = q.shape
    tokens, kv_heads, _ = keys.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    is_there = (positions >= 0)[:, None, None]
    is_live = (jnp.arange(tokens) <= jnp.max(positions))[:, None, None]
    q = jnp.where(is_there, q, 0).reshape(rows, kv_heads, heads // kv_heads, width)
    keys, values = jnp.where(is_live, keys, 0), jnp.where(is_live, values, 0)  # A page may hold NaN.

    scores = jnp.einsum("rkgw,tkw->kgrt", q, keys, preferred_element_type=wide)
    scores = scores * (width**-0.5 if scale is None else scale)
    visible = jnp.arange(tokens) <= jnp.maximum(positions, 0)[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(q.dtype)
    output = jnp.einsum("kgrt,tkw->rkgw", weights, values, preferred_element_type=wide)
    return jnp.where(is_there, output.reshape(rows, heads, width), 0).astype(q.dtype)
