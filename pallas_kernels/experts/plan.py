"""Where every (row, rank) pair lies when the rows of one expert lie together: integer work alone."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from isojax.errors import ShardingError
from isojax.layouts import CHUNK, Segments
from isojax.pytrees import pytree
from pallas_kernels.collectives import from_owners
from pallas_kernels.sharding import AxisName, axis_size, sharded_rows

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
        owner: On the ranks of a mesh axis the one that has the expert of each choice; what is above is then of the
            experts of this rank, and of the rows of all. None on one device.
        axis_name: The mesh axis that experts are sharded over.
        rows_sharded: Whether a rank has its piece of the rows; else all ranks have all rows.
    """

    row: Int32[Array, " pairs"]
    rank: Int32[Array, " pairs"]
    position: Int32[Array, "rows ranks"]
    tile_expert: Int32[Array, " tiles"]
    tile_pairs: Int32[Array, " tiles"]
    first_tile: Int32[Array, " group_bounds"]
    num_experts: int = dataclasses.field(metadata={"static": True})
    num_sequences: int = dataclasses.field(metadata={"static": True})
    owner: Int32[Array, "rows ranks"] | None = None
    axis_name: AxisName | None = dataclasses.field(default=None, metadata={"static": True})
    rows_sharded: bool = dataclasses.field(default=False, metadata={"static": True})

    def all_rows(self, x: Shaped[Array, "own_rows *shape"]) -> Shaped[Array, "rows *shape"]:
        """The rows of all ranks, as the plan counts them."""
        return lax.all_gather(x, self.axis_name, tiled=True) if self.rows_sharded else x

    def from_owners(self, y: Float[Array, "rows ranks width"]) -> Float[Array, "own_rows ranks width"]:
        """For each choice what the rank of its expert has for it."""
        if self.owner is None or self.axis_name is None:
            return y
        own = from_owners(y.reshape(-1, y.shape[-1]), self.owner.reshape(-1), self.axis_name, scatter=self.rows_sharded)
        return own.reshape(-1, *y.shape[1:])

    def refuse_ranks(self, op: str) -> None:
        """For ops that know one device alone.

        Raises:
            ShardingError: If the plan is that of a rank.
        """
        if self.axis_name is not None:
            raise ShardingError(
                f"the native {op} runs on one device, got a plan over {self.axis_name}: bind the exact contract"
            )


def max_tiles(choices: int, groups: int) -> int:
    """How many tiles `choices` pairs can need in `groups` groups, at most.

    A group of n >= 1 pairs needs ⌈n/16⌉ <= (n + 15)/16 tiles, and at most min(groups, choices) groups
    have a pair, so that all need at most (choices + 15 · min(groups, choices))/16. Reached when
    all those groups but one have one pair.
    """
    return (choices + (TILE - 1) * min(groups, choices)) // TILE


def dispatch_plan(
    experts: Int32[Array, "own_rows ranks"],
    num_experts: int,
    segments: Segments | None = None,
    *,
    axis_name: AxisName | None = None,
    gather_axis: Literal[0] | None = None,
) -> Plan:
    """Lays the pairs of `experts` out for grouped products.

    Inside `shard_map` with `axis_name` a rank has its run of the experts, and the ops that take the plan give the bits
    of one device: rows go to the ranks of their experts, the outputs come home before they are added.

    Args:
        experts: The experts of each row, each at most once. `num_experts` or more is no expert: such
            pairs lie nowhere.
        num_experts: Number of experts, of all ranks.
        segments: The sequence of every 64 rows of all ranks, for weight gradients; by default one sequence.
        axis_name: The mesh axis that experts are sharded over, equally many on every rank.
        gather_axis: 0 if rows are sharded over the same axis; by default all ranks have all rows.

    Returns:
        The plan. Its size follows from shapes alone (`max_tiles`).

    Raises:
        ValueError: If `segments` are for another number of rows, or ranks do not get equally many experts.
    """
    rows_sharded = sharded_rows("dispatch_plan", "gather_axis", gather_axis, axis_name)
    owner = None
    if axis_name is not None:
        experts = lax.all_gather(experts, axis_name, tiled=True) if rows_sharded else experts
        num_experts = _experts_of_rank(num_experts, axis_name)
        owner = jnp.clip(experts // num_experts, 0, axis_size(axis_name) - 1)
        experts -= lax.axis_index(axis_name) * num_experts  # Those of other ranks become no expert.
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
        owner,
        axis_name,
        rows_sharded,
    )


def _experts_of_rank(num_experts: int, axis_name: AxisName) -> int:
    ranks = axis_size(axis_name)
    if num_experts % ranks:
        choices = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ShardingError(
            f"dispatch_plan spreads {num_experts} experts, which do not divide over {axis_name}={ranks}: shard over"
            f" {' or '.join(choices)} ranks"
        )
    return num_experts // ranks
