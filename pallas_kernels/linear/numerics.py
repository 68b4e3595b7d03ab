"""What decides the bits of a product, and what only its speed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from isojax.layouts import block_of, round_up, split_bounds


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """Decides the bits of a linear layer.

    Attributes:
        num_splits: Contiguous splits of the summed axis of a row-parallel product, the leaves of its tree.
        gradient_splits: Splits of the output axis in a column-parallel input gradient.
    """

    num_splits: int = 8
    gradient_splits: int = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of a product, never its bits.

    Attributes:
        rows: Rows of a tile on the CPU: a power of two from 8 to 256; by default the least that holds all rows.
        columns: Columns of a tile on the CPU, a multiple of 16.
        hopper: The `hopper.HopperSchedule`; by default one chosen from the shape of the product.
    """

    rows: int | None = None
    columns: int = 128
    hopper: Any = None

    def row_tile(self, rows: int) -> int:
        """The rows of a tile for a product of `rows` rows."""
        return self.rows or min(256, max(8, 1 << (rows - 1).bit_length()))


def split_axis(x: jax.Array, num_splits: int) -> tuple[jax.Array, int]:
    """Cuts the last axis into splits, each padded with zeros to whole blocks.

    Returns:
        `[..., num_splits, padded]` and the block length. Both follow from the axis and the number of
        splits alone, so that a shard that holds whole splits lays them out alike.
    """
    bounds = split_bounds(x.shape[-1], num_splits)
    longest = max(end - start for start, end in bounds)
    block = block_of(longest)
    padded = round_up(longest, block)
    pieces = [
        jnp.pad(x[..., start:end], [(0, 0)] * (x.ndim - 1) + [(0, padded - (end - start))]) for start, end in bounds
    ]
    return jnp.stack(pieces, axis=-2), block
