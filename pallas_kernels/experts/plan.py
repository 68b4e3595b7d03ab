"""Where every (row, rank) pair lies when the rows of one expert lie together: integer work alone."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from isojax.layouts import CHUNK, Segments
from isojax.pytrees import pytree

TILE = 16
"""Pairs of a tile. Every (expert, sequence) group starts on a tile: part of the numerics of weight gradients."""


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The layout of pairs: by expert, then sequence, then row, then rank; every group in whole tiles.

    Pads fill the last tile of each group, dead tiles the end. Group g = expert · num_sequences + sequence.

    Attributes:
        row: The row of each pair; the number of rows for pads.
        rank: The rank of each pair among its row's experts; 0 for pads.
        position: Where the pair of each row and rank lies; the number of pairs for none.
        tile_expert: The expert of each tile; `num_experts` for dead tiles.
        tile_pairs: How many pairs of each tile are real; the rest are pads. 0 for dead tiles.
        first_tile: First tile of each group; the last entry is the number of live tiles.
        num_experts: Number of experts.
        num_sequences: Number of sequences that gradients are chained in.
    """

    row: Int32[Array, " pairs"]
    rank: Int32[Array, " pairs"]
    position: Int32[Array, "rows ranks"]
    tile_expert: Int32[Array, " tiles"]
    tile_pairs: Int32[Array, " tiles"]
    first_tile: Int32[Array, " group_bounds"]
    num_experts: int = dataclasses.field(metadata={"static": True})
    num_sequences: int = dataclasses.field(metadata={"static": True})


def max_tiles(choices: int, groups: int) -> int:
    """How many tiles `choices` pairs can need in `groups` groups, at most.

    A group of n >= 1 pairs needs ⌈n/16⌉ <= (n + 15)/16 tiles, and at most min(groups, choices) groups
    have a pair, so that all need at most (choices + 15 · min(groups, choices))/16. Reached when
    all those groups but one have one pair.
    """
    return (choices + (TILE - 1) * min(groups, choices)) // TILE


def dispatch_plan(experts: Int32[Array, "rows ranks"], num_experts: int, segments: Segments | None = None) -> Plan:
    """Lays the pairs of `experts` out for grouped products.

    Args:
        experts: The experts of each row, each at most once. `num_experts` or more is no expert: such
            pairs lie nowhere.
        num_experts: Number of experts.
        segments: The sequence of every 64 rows, for weight gradients; by default one sequence.

    Returns:
        The plan. Its size follows from shapes alone (`max_tiles`).

    Raises:
        ValueError: If `segments` are for another number of rows.
    """
    rows, ranks = experts.shape
    segments = segments or Segments.one(rows)
    if segments.sequence.shape[0] != -(-rows // CHUNK):
        raise ValueError(
            f"dispatch_plan got segments of {segments.sequence.shape[0]} blocks for {rows} rows:"
            f" pass one sequence for every {CHUNK} rows"
        )
    choices, groups = rows * ranks, num_experts * segments.count
    tiles = max_tiles(choices, groups)

    sequence = jnp.repeat(segments.sequence, CHUNK)[:rows, None]
    group = jnp.where((experts >= 0) & (experts < num_experts), experts * segments.count + sequence, groups).reshape(-1)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)  # By group; row and rank ascend inside, as in `group`.
    bounds = jnp.searchsorted(group[order], jnp.arange(groups + 1)).astype(jnp.int32)
    size = jnp.diff(bounds)
    first_tile = jnp.cumulative_sum(-(-size // TILE), include_initial=True).astype(jnp.int32)

    # From pairs to choices: the group of each tile, then the place inside the group.
    tile = jnp.arange(tiles, dtype=jnp.int32)
    tile_group = (jnp.searchsorted(first_tile, tile, side="right") - 1).astype(jnp.int32)  # `groups` for dead tiles
    live = tile_group < groups
    tile_group = jnp.minimum(tile_group, groups - 1)
    offset = TILE * (tile - first_tile[tile_group])
    tile_pairs = jnp.where(live, jnp.clip(size[tile_group] - offset, 0, TILE), 0)
    inside = jnp.arange(TILE, dtype=jnp.int32)
    real = inside < tile_pairs[:, None]
    choice = order.at[(bounds[tile_group] + offset)[:, None] + inside].get(mode="clip")
    row = jnp.where(real, choice // ranks, rows).reshape(-1)
    rank = jnp.where(real, choice % ranks, 0).reshape(-1)

    # From choices to pairs: the place of each choice in the order, shifted to its group's first tile.
    place = jnp.argsort(order).astype(jnp.int32)
    home = jnp.minimum(group, groups - 1)
    position = jnp.where(group < groups, TILE * first_tile[home] + place - bounds[home], TILE * tiles)
    return Plan(
        row,
        rank,
        position.reshape(rows, ranks),
        jnp.where(live, tile_group // segments.count, num_experts),
        tile_pairs,
        first_tile,
        num_experts,
        segments.count,
    )
