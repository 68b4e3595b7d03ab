"""Sequences for Gated DeltaNet and ways to run them: whole, in pieces, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gdn
from pallas_kernels.gdn import reference
from pallas_kernels.step import Decode
from tests.pallas_kernels.pieces import packed, pieces_of, unpacked

SIZES = (2, 4, 16, 32)  # Key heads, value heads, key and value dimensions.
BLOCKS = 4  # Every piece is padded to as many blocks: one program serves all.


def sequence(length, dtype="float32", seed=0, decay=0.3, sizes=SIZES):
    """q, k, v, g, β of one sequence, as they come from norms and gates, with some rows of zeros and extremes."""
    key_heads, heads, key_dim, value_dim = sizes
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, length, key_heads, key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q * key_dim**-0.5, k))
    v = rng.standard_normal((length, heads, value_dim))
    g = -decay * np.log1p(np.exp(2 * rng.standard_normal((length, heads))))
    beta = 1 / (1 + np.exp(-rng.standard_normal((length, heads))))
    for i, x in enumerate((q, k, v, -v, g, beta)):
        x[5 + i : 6 + i] = 0
    beta[20:21], g[21:22] = 1, -100
    compute = jnp.dtype(dtype)
    return q.astype(compute), k.astype(compute), v.astype(compute), g.astype(np.float32), beta.astype(np.float32)


def sizes_of(rows):
    return *rows[1].shape[1:2], *rows[2].shape[1:2], rows[1].shape[2], rows[2].shape[2]


def slots_of(op, num_slots, dtype, sizes=SIZES):
    return op.gdn_slots(num_slots, *sizes, dtype)


def no_state(count=1, sizes=SIZES):
    return jnp.zeros((count, *sizes[1:]), jnp.float32)


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
    o, state, opened = chunk_form(blocked, chunks, no_state(1, sizes_of(rows)))
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
    count, sizes = len(sequences), sizes_of(sequences[0])
    state, slots = no_state(count, sizes), slots_of(op, count, sequences[0][2].dtype, sizes)
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
