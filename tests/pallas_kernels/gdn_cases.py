"""Sequences for Gated DeltaNet and ways to run them: whole, in pieces, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gdn
from pallas_kernels.gdn import reference
from pallas_kernels.step import Decode
from tests.pallas_kernels.pieces import packed, pieces_of, unpacked

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 32
BLOCKS = 4  # Every piece is padded to as many blocks: one program serves all.


def sequence(length, dtype="float32", seed=0, decay=0.3):
    """q, k, v, g, β of one sequence, as they come from norms and gates."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, length, KEY_HEADS, KEY_DIM))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q * KEY_DIM**-0.5, k))
    v = rng.standard_normal((length, HEADS, VALUE_DIM))
    g = -decay * np.log1p(np.exp(2 * rng.standard_normal((length, HEADS))))
    beta = 1 / (1 + np.exp(-rng.standard_normal((length, HEADS))))
    compute = jnp.dtype(dtype)
    return q.astype(compute), k.astype(compute), v.astype(compute), g.astype(np.float32), beta.astype(np.float32)


def slots_of(op, num_slots, dtype):
    return op.gdn_slots(num_slots, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, dtype)


def no_state(count=1):
    return jnp.zeros((count, HEADS, KEY_DIM, VALUE_DIM), jnp.float32)


@functools.partial(jax.jit, static_argnames="op")
def chunk_form(rows, chunks, state, open=None, op=gdn):
    return op.gdn_chunks(*rows, chunks, state, open)


@functools.partial(jax.jit, static_argnames="op")
def row_form(rows, decode, slots, slot, state, op=gdn):
    """One token of each request, and the closing of the chunks that it fills."""
    o, slots = op.gdn_decode(*rows, decode, slots, slot)
    state, slots = op.gdn_close(decode, slots, slot, state)
    return o, state, slots


def whole(rows, blocks=BLOCKS):
    """Outputs, state and open chunk of one sequence from one call that knows no cache."""
    blocked, chunks = packed([rows], blocks=blocks)
    o, state, opened = chunk_form(blocked, chunks, no_state())
    return unpacked(o, chunks)[0], state, opened


def in_pieces(rows, cuts, op=gdn):
    """The same from one call a piece."""
    outputs, state, opened = [], no_state(), slots_of(op, 1, rows[2].dtype)
    for begin, end in pieces_of(len(rows[0]), cuts):
        blocked, chunks = packed([tuple(x[begin:end] for x in rows)], starts=[begin], blocks=BLOCKS)
        o, state, opened = chunk_form(blocked, chunks, state, opened, op=op)
        outputs += unpacked(o, chunks)
    return np.concatenate(outputs), state, opened


def token_by_token(sequences, step=row_form, op=gdn):
    """Outputs of every sequence, states and slots, from decode steps of all sequences at once; slots in reverse."""
    count, dtype = len(sequences), sequences[0][2].dtype
    state, slots = no_state(count), slots_of(op, count, dtype)
    slot = jnp.arange(count, dtype=jnp.int32)[::-1]
    lengths = np.array([len(rows[0]) for rows in sequences])
    outputs = [[] for _ in sequences]
    for t in range(lengths.max()):
        valid = t < lengths
        rows = [np.stack([x[min(t, len(x) - 1)] for x in field]) for field in zip(*sequences, strict=True)]
        rows = [np.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, np.asarray(np.nan, x.dtype)) for x in rows]
        decode = Decode(jnp.full(count, t, jnp.int32), jnp.asarray(valid))
        o, new, slots = step(tuple(rows), decode, slots, slot, state, op=op)
        state = jnp.where(valid[:, None, None, None], new, state)
        for i in np.flatnonzero(valid):
            outputs[i].append(np.asarray(o[i]))
    return [np.stack(o) for o in outputs], state, jax.tree.map(lambda x: x[::-1], slots)


def oracle(rows):
    """The recurrence in float64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(reference.recurrent)(*(jnp.asarray(x, jnp.float64) for x in rows)))


def present(opened, index, length):
    """What a request's open chunk holds in the rows that are there."""
    count = length % 64
    rows = [getattr(opened, name)[index] for name in ("k", "r", "u", "t", "decay", "beta")]
    return [np.asarray(x)[:, :count] for x in rows], np.asarray(opened.state[index])
