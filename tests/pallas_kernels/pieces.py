"""Sequences as pieces on the 64-row grid, for tests of ops that carry state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.step import Chunks


def pieces_of(length, cuts):
    """Begin and end of the pieces of a sequence that is cut before the tokens `cuts`."""
    return list(itertools.pairwise([0, *(c for c in cuts if c < length), length]))


def packed(sequences, starts=None, blocks=0, num_sequences=None, padding=np.nan):
    """Blocks of 64 rows and their `Chunks`.

    Args:
        sequences: The tokens of each sequence's piece, any tree of arrays `[tokens, ...]`.
        starts: The absolute position of the first token of each piece; 0 by default.
        blocks: Least number of blocks; blocks without rows fill the end.
        num_sequences: Sequences of the step, of which the last may have no block.
        padding: What absent rows hold.
    """
    starts = starts or [0] * len(sequences)
    parts, where = [], []
    for s, (piece, start) in enumerate(zip(sequences, starts, strict=True)):
        length = len(jax.tree.leaves(piece)[0])
        for index in range(start // 64, -(-(start + length) // 64)):
            begin, end = max(start - 64 * index, 0), min(start + length - 64 * index, 64)
            first = 64 * index + begin - start
            rows = slice(first, first + end - begin)
            parts.append(jax.tree.map(lambda x, r=rows, b=begin, e=end: _pad(x, r, b, 64 - e, padding), piece))
            where.append((s, index, begin, end))
    empty = jax.tree.map(lambda x: _pad(x, slice(0), 64, 0, padding), sequences[0])
    missing = max(0, blocks - len(parts))
    fields = (jnp.asarray(column) for column in np.array(where + [(0, 0, 0, 0)] * missing, np.int32).T)
    stacked = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *parts, *[empty] * missing)
    return stacked, Chunks(*fields, num_sequences=num_sequences or len(sequences))


def unpacked(blocks, chunks):
    """The rows of each sequence that has a block, in order."""
    rows = {}
    for block, s, begin, end in zip(
        *(np.asarray(x) for x in (blocks, chunks.sequence, chunks.begin, chunks.end)), strict=True
    ):
        if end > 0:
            rows.setdefault(int(s), []).append(block[begin:end])
    return [np.concatenate(parts) for _, parts in sorted(rows.items())]


def _pad(x, rows, before, after, value):
    x = np.asarray(x)
    fill = [np.full((n, *x.shape[1:]), value, x.dtype) for n in (before, after)]
    return np.concatenate([fill[0], x[rows], fill[1]])
