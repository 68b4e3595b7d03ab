"""How arrays lie: the 64-token grid, blocks of summed axes, splits, and which rows form a sequence."""

import dataclasses
import itertools

import jax.numpy as jnp
from jaxtyping import Array, Int32

from isojax.pytrees import pytree

CHUNK = 64
"""Tokens of one grid cell. Sequences start on the grid; attention and Gated DeltaNet block by it."""

_BLOCKS = (16, 32, 64, 128)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that holds `size`."""
    return -(-size // multiple) * multiple


def block_of(size: int) -> int:
    """The block that a summed axis of `size` is cut into: the least of 16, 32, 64, 128 that holds it, else 128."""
    return next((block for block in _BLOCKS if size <= block), _BLOCKS[-1])


def split_bounds(size: int, num_splits: int) -> tuple[tuple[int, int], ...]:
    """Start and end of each of `num_splits` contiguous splits of an axis of `size`.

    Bounds are ⌊size·s/num_splits⌋, so that a rank of any number of ranks that divides
    `num_splits` holds whole splits. Splits may be empty when `size` is below `num_splits`.
    """
    edges = [size * s // num_splits for s in range(num_splits + 1)]
    return tuple(itertools.pairwise(edges))


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """Which sequence each 64-row block of a packed batch belongs to.

    A sequence is a *gradient block*: its terms form one float32 chain, in row order. The
    sequences of a batch are an aligned run of one *gradient group* and meet in tree order.

    Attributes:
        sequence: For every 64-row block, the index of its sequence in the run.
        count: Number of sequences in the run; absent ones count as zero.
    """

    sequence: Int32[Array, " blocks"]
    count: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def one(cls, rows: int) -> "Segments":
        """All `rows` belong to one sequence."""
        return cls(jnp.zeros(round_up(rows, CHUNK) // CHUNK, jnp.int32), 1)
