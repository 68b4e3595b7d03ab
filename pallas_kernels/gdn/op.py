"""Gated DeltaNet: whole chunks and single tokens compute the same bits (docs/gated_deltanet.md)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from isojax.layouts import CHUNK
from pallas_kernels.gdn import backward
from pallas_kernels.gdn import chunks as chunk_form
from pallas_kernels.gdn import decode as row_form
from pallas_kernels.gdn.numerics import MAX_HEAD_DIM, Numerics, Schedule
from pallas_kernels.gdn.slots import OpenChunk, gdn_slots
from pallas_kernels.step import Chunks, Decode


def gdn_chunks(
    q: Float[Array, "blocks 64 key_heads key_dim"],
    k: Float[Array, "blocks 64 key_heads key_dim"],
    v: Float[Array, "blocks 64 heads value_dim"],
    g: Float32[Array, "blocks 64 heads"],
    beta: Float32[Array, "blocks 64 heads"],
    chunks: Chunks,
    state: Float32[Array, "sequences heads key_dim value_dim"],
    open: OpenChunk | None = None,
    *,
    numerics: Numerics = Numerics(),
    schedule: Schedule = Schedule(),
) -> tuple[Float[Array, "blocks 64 heads value_dim"], Float32[Array, "sequences heads key_dim value_dim"], OpenChunk]:
    """The delta rule over the blocks of a step.

    In each chunk, for every value head (its key head is h // (heads / key_heads)), with G the running sum of g:

        A_ij = β_i (k_i·k_j) exp(G_i − G_j)    j < i, in float32, products in this order
        T = (I + A)^-1                         row i = e_i − A_i0 T_0 − A_i1 T_1 − …, products rounded
        R = β (V − exp(G) (K S)),  U = T R,  O = exp(G) (Q S) + P U,  P_ij = (q_i·k_j) exp(G_i − G_j), j ≤ i
        S' = exp(G_63) S + Kᵀ diag(exp(G_63 − G)) U

    Matrix products take operands in the compute dtype (T, R, U, P, the decayed keys and S are rounded to it) and
    add in float32, ascending; S itself stays float32. Row i needs rows up to i alone, so a row has the same bits
    in a whole sequence, in pieces cut anywhere, and token by token through `gdn_decode`; batch mates, padding
    and schedule change none. Rows that are not there are not read and come out zero.

    The gradient, by `backward`, flows to q, k, v, g and β; states and open chunks are cache and have none.

    Args:
        q: Queries, normalised and scaled, in the compute dtype (bfloat16 or float32).
        k: Normalised keys.
        v: Values.
        g: Log decay, at most 0.
        beta: Writing strength.
        chunks: Which rows are there. A sequence's chunk 0 starts from zero, whatever `state` holds.
        state: State of each sequence after the last chunk that it has closed.
        open: Each sequence's open chunk, read where a piece starts inside a chunk; without it none may.
        numerics: What decides bits.
        schedule: How heads are spread over programs.

    Returns:
        Outputs, each sequence's state after its last closed chunk, and its open chunk. Sequences without a block
        keep what they had.

    Raises:
        ValueError: If heads or dtypes do not fit each other, or a gradient is asked for across cached rows.
    """
    del numerics  # There is one form; the contract names it.
    _check("gdn_chunks", q, k, v)
    return _chunks(schedule, q, k, v, g, beta, chunks, state, open)


def gdn_decode(
    q: Float[Array, "requests key_heads key_dim"],
    k: Float[Array, "requests key_heads key_dim"],
    v: Float[Array, "requests heads value_dim"],
    g: Float32[Array, "requests heads"],
    beta: Float32[Array, "requests heads"],
    decode: Decode,
    slots: OpenChunk,
    slot: Int32[Array, " requests"],
    *,
    numerics: Numerics = Numerics(),
) -> tuple[Float[Array, "requests heads value_dim"], OpenChunk]:
    """One token of each request: the row of `gdn_chunks` at `decode.position`, from the slots' rows before it.

    Args:
        q: Queries, as in `gdn_chunks`.
        k: Keys.
        v: Values.
        g: Log decay.
        beta: Writing strength.
        decode: Positions; rows that are not valid come out zero and write nothing.
        slots: Open chunks of all requests.
        slot: Each row's slot.
        numerics: What decides bits.

    Returns:
        Outputs, and the slots with the new rows.

    Raises:
        ValueError: If heads or dtypes do not fit each other.
    """
    del numerics
    _check("gdn_decode", q, k, v)
    offset = decode.position % CHUNK
    held = jax.tree.map(lambda x: x.at[slot].get(mode="clip"), slots)
    first = (decode.position < CHUNK)[:, None, None, None]
    held = dataclasses.replace(held, state=jnp.where(first, 0, held.state))
    o, r, u, t, total = row_form.row(q, k, v, g, beta, jnp.where(decode.valid, offset, 0), held)
    at = jnp.where(decode.valid, slot, slots.k.shape[0])  # Beyond the slots: dropped.
    new = {"k": k, "r": r, "u": u, "t": t, "decay": total, "beta": beta}
    rows = {name: getattr(slots, name).at[at, :, offset].set(row, mode="drop") for name, row in new.items()}
    slots = dataclasses.replace(slots, **rows)
    return jnp.where(decode.valid[:, None, None], o, 0), slots


def gdn_close(
    decode: Decode,
    slots: OpenChunk,
    slot: Int32[Array, " requests"],
    state: Float32[Array, "requests heads key_dim value_dim"],
    *,
    numerics: Numerics = Numerics(),
) -> tuple[Float32[Array, "requests heads key_dim value_dim"], OpenChunk]:
    """Closes the chunks that the rows of `decode` have filled; called after `gdn_decode`.

    Args:
        decode: Positions; a valid row at the end of a chunk closes it.
        slots: Open chunks of all requests, with the new rows.
        slot: Each row's slot.
        state: Each request's state at the start of its chunk; zero in chunk 0, whatever this holds.
        numerics: What decides bits.

    Returns:
        Each request's state after its last closed chunk, and the slots with the new states as operands.
    """
    del numerics
    held = jax.tree.map(lambda x: x.at[slot].get(mode="clip"), slots)
    closing = decode.valid & (decode.position % CHUNK == CHUNK - 1)
    state = jnp.where((decode.position < CHUNK)[:, None, None, None], 0, state)
    state, operand = row_form.close(held, closing, state)
    at = jnp.where(closing, slot, slots.k.shape[0])
    return state, dataclasses.replace(slots, state=slots.state.at[at].set(operand, mode="drop"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(schedule, q, k, v, g, beta, chunks, state, open):
    return _run(schedule, q, k, v, g, beta, chunks, state, open)[0]


def _run(schedule, q, k, v, g, beta, chunks, state, open):
    """The results of `_chunks`, and what its backward pass reads."""
    held = open or gdn_slots(chunks.num_sequences, *k.shape[2:3], *v.shape[2:3], k.shape[3], v.shape[3], v.dtype)
    q, k, v, beta = (_heads_first(x, chunks) for x in (q, k, v, beta))
    cached = jnp.arange(CHUNK) < chunks.begin[:, None, None]
    k = jnp.where(cached[..., None], held.k[chunks.sequence], k)
    beta = jnp.where(cached, held.beta[chunks.sequence], beta)
    decay = _running_sum(_heads_first(g, chunks), held.decay[chunks.sequence], chunks.begin)
    rows = chunk_form.Rows(q, k, v, beta, decay)
    *results, kept = chunk_form.forward(rows, chunks, state, held, schedule)
    o, last, opened = results
    return (jnp.swapaxes(o, 1, 2), last, opened), (rows, kept)


def _forward(schedule, q, k, v, g, beta, chunks, state, open):
    if open is not None:
        raise ValueError(
            "gdn_chunks has no gradient across the cached rows of an open chunk: differentiate whole sequences, with"
            " open=None, or stop gradients before the call"
        )
    results, kept = _run(schedule, q, k, v, g, beta, chunks, state, open)
    return results, (*kept, chunks)


def _backward(schedule, residuals, grads):
    rows, kept, chunks = residuals
    found = backward.gradients(rows, kept, _heads_first(grads[0], chunks), chunks, schedule)
    nothing = jnp.zeros_like(found.decay)
    g_grad = _running_sum(found.decay[:, :, ::-1], nothing, jnp.zeros_like(chunks.begin))[:, :, ::-1]
    back = (_rows_first(x, chunks) for x in (found.q, found.k, found.v, g_grad, found.beta))
    return (*back, None, None, None)


_chunks.defvjp(_forward, _backward)


def _running_sum(terms, known, begin):
    """`chunks.running_sum` over the last axis of `[blocks, heads, 64]`."""
    columns = (jnp.moveaxis(x, 2, 0).reshape(CHUNK, -1) for x in (terms, known))
    sums = chunk_form.running_sum(*columns, jnp.repeat(begin, terms.shape[1]))
    return jnp.moveaxis(sums.reshape(CHUNK, *terms.shape[:2]), 0, 2)


def _there(chunks: Chunks, ndim: int):
    row = jnp.arange(CHUNK)
    there = (row >= chunks.begin[:, None]) & (row < chunks.end[:, None])
    return there.reshape(*there.shape, *(1,) * (ndim - 2))


def _heads_first(x, chunks: Chunks):
    """Blocks `[rows, heads, …]` with heads first; rows that are not there become zero, whatever they held."""
    return jnp.swapaxes(jnp.where(_there(chunks, x.ndim), x, 0), 1, 2)


def _rows_first(x, chunks: Chunks):
    x = jnp.swapaxes(x, 1, 2)
    return jnp.where(_there(chunks, x.ndim), x, 0)


def _check(name: str, q, k, v) -> None:
    key_heads, heads = k.shape[-2], v.shape[-2]
    if heads % key_heads:
        raise ValueError(f"{name} gives each of {key_heads} key heads as many value heads, got {heads}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{name} takes queries, keys and values of one compute dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if max(k.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        raise ValueError(
            f"{name} sums a head in one chain of at most {MAX_HEAD_DIM} terms, got heads of {k.shape[-1]} and"
            f" {v.shape[-1]}: such heads need an order in the contract first"
        )
