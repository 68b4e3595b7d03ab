"""Sequences, pools and packed blocks for tests of attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from isojax.layouts import round_up
from pallas_kernels.attention import Numerics, Schedule, attention_chunks, attention_decode
from pallas_kernels.step import Chunks

NUMERICS = Numerics(kv_split=128)  # Two chunks a split, so that short sequences cross its border.


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Rows of one sequence: q `[tokens, heads, width]`, kv `[tokens, 2, kv_heads, width]`."""

    q: np.ndarray
    kv: np.ndarray

    def until(self, end: int) -> "Sequence":
        return Sequence(self.q[:end], self.kv[:end])


def sequence(seed: int, tokens: int, heads=4, kv_heads=2, width=16, dtype="float32") -> Sequence:
    rng = np.random.default_rng(seed)
    shapes = (tokens, heads, width), (tokens, 2, kv_heads, width)
    return Sequence(*(np.asarray(rng.standard_normal(s), jnp.dtype(dtype)) for s in shapes))


def pool(sequences, *, page_tokens=64, dead=np.nan, seed=0, pages=None):
    """The sequences in shuffled pages, `dead` wherever nothing lives; spare entries of the table name a dead page."""
    slots = 6  # One shape for most tests: they compile once.
    pages = pages or round_up(len(sequences) * slots, 32)
    order = np.random.default_rng(seed).permutation(pages)
    _, _, kv_heads, width = sequences[0].kv.shape
    kv = np.full((pages, 2, kv_heads, page_tokens, width), dead, sequences[0].kv.dtype)
    table = order[: len(sequences) * slots].reshape(len(sequences), slots).astype(np.int32)
    for s, row in zip(sequences, table, strict=True):
        for start in range(0, len(s.kv), page_tokens):
            tokens = s.kv[start : start + page_tokens]
            kv[row[start // page_tokens], :, :, : len(tokens)] = tokens.transpose(1, 2, 0, 3)
    return kv, table


def pack(sequences, pieces, *, blocks=6, dead=np.nan):
    """Blocks of the rows of `pieces`, which are (sequence, begin, end); then padding up to `blocks`."""
    cells = [(s, i, max(b - 64 * i, 0), min(e - 64 * i, 64)) for s, b, e in pieces for i in range(b // 64, -(-e // 64))]
    cells += [(0, 0, 0, 0)] * (blocks - len(cells))
    q = np.full((len(cells), 64, *sequences[0].q.shape[1:]), dead, sequences[0].q.dtype)
    for block, (s, i, begin, end) in zip(q, cells, strict=True):
        block[begin:end] = sequences[s].q[64 * i + begin : 64 * i + end]
    return q, Chunks(*jnp.asarray(cells, jnp.int32).T, num_sequences=len(sequences))


def rows_there(blocks, chunks: Chunks) -> np.ndarray:
    """The rows of blocks that are there, in order."""
    ends = zip(np.asarray(blocks), chunks.begin, chunks.end, strict=True)
    return np.concatenate([block[int(begin) : int(end)] for block, begin, end in ends])


@functools.partial(jax.jit, static_argnames=("numerics", "schedule", "scale"))
def run(q, kv, kv_pages, chunks, scale=None, numerics=NUMERICS, schedule=Schedule()):
    return attention_chunks(q, kv, kv_pages, chunks, scale=scale, numerics=numerics, schedule=schedule)


@functools.partial(jax.jit, static_argnames=("numerics", "scale"))
def run_decode(q, kv, kv_pages, decode, scale=None, numerics=NUMERICS):
    return attention_decode(q, kv, kv_pages, decode, scale=scale, numerics=numerics)


@functools.partial(jax.jit, static_argnames=("op", "schedule"))
def with_gradients(q, kv, kv_pages, chunks, cotangent, op=attention_chunks, schedule=Schedule()):
    """Output, dQ and dKV."""
    output, pull = jax.vjp(lambda q, kv: op(q, kv, kv_pages, chunks, numerics=NUMERICS, schedule=schedule), q, kv)
    return output, *pull(cotangent)


def whole(s: Sequence, **options) -> np.ndarray:
    """The output rows of a sequence that is alone and in one piece."""
    q, chunks = pack([s], [(0, 0, len(s.q))])
    return rows_there(run(q, *pool([s]), chunks, **options), chunks)


def in_float64(op, q, kv, *rest):
    with jax.enable_x64(True):
        return np.asarray(jax.jit(op)(q.astype(np.float64), kv.astype(np.float64), *rest))


def batch(sequences, begins=(0, 0, 0), **options):
    """The sequences one after another, each in one piece from its `begins` on; empty ones have no block."""
    pieces = [(i, begin, len(s.q)) for i, (begin, s) in enumerate(zip(begins, sequences, strict=True))]
    q, chunks = pack(sequences, pieces, blocks=8)
    return q, *pool(sequences, **options), chunks
