"""Computes the delta rule over whole chunks: all rows of a chunk at once, the chunks of a sequence in a chain."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from isojax.layouts import CHUNK
from isojax.pytrees import pytree
from pallas_kernels.gdn.arithmetic import (
    as_operand,
    decay_between,
    exponential,
    lower,
    next_state,
    per_value_head,
    product,
    unit_inverse,
    written_rows,
)
from pallas_kernels.gdn.numerics import Schedule
from pallas_kernels.gdn.program import num_programs, over_heads
from pallas_kernels.gdn.slots import OpenChunk
from pallas_kernels.region import exact_product, region_call
from pallas_kernels.step import Chunks


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of every block, heads first; rows that are not there are zero."""

    q: Float[Array, "blocks key_heads 64 key_dim"]
    k: Float[Array, "blocks key_heads 64 key_dim"]
    v: Float[Array, "blocks heads 64 value_dim"]
    beta: Float32[Array, "blocks heads 64"]
    decay: Float32[Array, "blocks heads 64"]


class Kept(NamedTuple):
    """What the backward pass reads of every block, as operands in the compute dtype.

    Attributes:
        state: S at the chunk's start, `[blocks, heads, key_dim, value_dim]`.
        inverse: T, `[blocks, heads, 64, 64]`.
    """

    state: Any
    inverse: Any


def running_sum(
    terms: Float32[Array, "64 columns"], known: Float32[Array, "64 columns"], begin: Int32[Array, " columns"]
) -> Float32[Array, "64 columns"]:
    """Sums down the rows, one addition a row; rows before `begin` are `known` already."""

    def running_sum_kernel(
        terms_ref,  # [64, columns]
        known_ref,  # [64, columns]
        begin_ref,  # [columns]
        sums_ref,  # [64, columns]
    ):
        begin = begin_ref[...]

        def add(row, total):
            total = jnp.where(row < begin, known_ref[row], total + terms_ref[row])
            sums_ref[row] = total
            return total

        lax.fori_loop(0, CHUNK, add, jnp.zeros(begin.shape, jnp.float32))

    shape = jax.ShapeDtypeStruct(terms.shape, jnp.float32)
    return region_call("gdn.decay", running_sum_kernel, out_shape=shape)(terms, known, begin)


def forward(
    rows: Rows,
    chunks: Chunks,
    state: Float32[Array, "sequences heads key_dim value_dim"],
    held: OpenChunk,
    schedule: Schedule,
) -> tuple[
    Float[Array, "blocks heads 64 value_dim"], Float32[Array, "sequences heads key_dim value_dim"], OpenChunk, Kept
]:
    """Outputs of every block, each sequence's state after its last closed chunk, and its open chunk."""
    dtype = rows.v.dtype
    blocks, heads, _, value_dim = rows.v.shape
    key_heads, key_dim = rows.k.shape[1], rows.k.shape[3]

    def gdn_chunks_kernel(inputs, outputs):
        chunks_ref, rows_ref, state_ref, held_ref = inputs
        o_ref, last_ref, open_ref, kept_ref = outputs
        last_ref[...] = state_ref[...]
        jax.tree.map(lambda to, source: to.__setitem__(..., source[...]), open_ref, held_ref)
        row = lax.broadcasted_iota(jnp.int32, (1, CHUNK, 1), 1)

        def block(c, carry):
            state, current = carry
            sequence, begin, end = chunks_ref.sequence[c], chunks_ref.begin[c], chunks_ref.end[c]
            is_there, closed = end > 0, end == CHUNK
            initial = jnp.where(chunks_ref.index[c] == 0, 0.0, state_ref[sequence])
            state = jnp.where(is_there & (sequence != current), initial, state)
            entering = as_operand(state, dtype)

            q, k, v = (ref[c].astype(jnp.float32) for ref in (rows_ref.q, rows_ref.k, rows_ref.v))
            beta, decay = rows_ref.beta[c], rows_ref.decay[c]
            between = decay_between(decay[:, :, None], decay[:, None, :], lower(strict=False))
            kk, qk = (per_value_head(product(x, k, (1, 1)), v.shape[0]) for x in (k, q))
            t = unit_inverse(jnp.where(lower(strict=True), beta[:, :, None] * kk * between, 0.0))
            inverse = as_operand(t, dtype)

            q, k = per_value_head(q, v.shape[0]), per_value_head(k, v.shape[0])
            gamma = exponential(decay)[:, :, None]
            r = written_rows(beta[:, :, None], v, gamma, product(k, entering), dtype)
            r = jnp.where(row < begin, held_ref.r[sequence].astype(jnp.float32), r)
            u = as_operand(product(inverse, r), dtype)
            o = exact_product(gamma, product(q, entering)) + product(as_operand(qk * between, dtype), u)
            o_ref[c] = jnp.where((row >= begin) & (row < end), o, 0.0).astype(dtype)
            state = jnp.where(closed, next_state(state, k, u, decay, dtype), state)

            def store(ref, x):
                ref[sequence] = jnp.where(is_there, x.astype(ref.dtype), ref[sequence])

            opened = row < jnp.where(closed, 0, end)
            store(last_ref, state)
            store(open_ref.state, state)
            for ref, x in ((open_ref.k, rows_ref.k[c]), (open_ref.r, r), (open_ref.u, u), (open_ref.t, t)):
                store(ref, jnp.where(opened, x, 0))
            for ref, x in ((open_ref.decay, decay), (open_ref.beta, beta)):
                store(ref, jnp.where(opened[..., 0], x, 0))
            kept_ref.state[c] = entering.astype(dtype)
            kept_ref.inverse[c] = inverse.astype(dtype)
            return state, jnp.where(is_there, sequence, current)

        lax.fori_loop(0, blocks, block, (jnp.zeros(state_ref.shape[1:], jnp.float32), jnp.int32(-1)))

    def shape(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    kept = Kept(shape(blocks, heads, key_dim, value_dim), shape(blocks, heads, CHUNK, CHUNK))
    last = shape(*state.shape, dtype=jnp.float32)
    opened = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), held)
    return over_heads(
        "gdn.chunks",
        gdn_chunks_kernel,
        (chunks, rows, state, held),
        (shape(*rows.v.shape), last, opened, kept),
        num_programs(key_heads, schedule.key_heads),
    )
