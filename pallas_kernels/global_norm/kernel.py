"""Squares added tile by tile, tiles by index, tensors by name."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from isojax import trees
from isojax.layouts import round_up
from pallas_kernels.region import exact_product, region_call
from pallas_kernels.tree_sum import fold_axis


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of `global_norm`, never its bits."""

    elements: int = 1 << 18  # About how many elements a program takes, in whole rows of tiles.


def tile_sums(x: jax.Array, tile: tuple[int, int], schedule: Schedule = Schedule()) -> jax.Array:
    """Computes `reference.tile_sums` of `[rows, columns]`, whose tiles divide it."""
    rows, width = x.shape
    high, wide = tile
    block = min(round_up(max(schedule.elements // width, 1), high), rows)
    padded = round_up(rows, block)

    def tile_sums_kernel(
        x_ref,  # [block, columns]
        sums_ref,  # [block / high, columns / wide]
    ):
        values = x_ref[...].astype(jnp.float32)
        squares = exact_product(values, values).reshape(block, width // wide, wide)
        by_row = fold_axis(squares, 2).reshape(block // high, high, width // wide)
        sums_ref[...] = fold_axis(by_row, 1)[:, 0]

    return region_call(
        "global_norm.tiles",
        tile_sums_kernel,
        out_shape=jax.ShapeDtypeStruct((padded // high, width // wide), jnp.float32),
        grid=(padded // block,),
        in_specs=[pl.BlockSpec((block, width), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((block // high, width // wide), lambda i: (i, 0)),
    )(jnp.pad(x, ((0, padded - rows), (0, 0))))[: rows // high]


def norm_of_tiles(tiles: Sequence[jax.Array]) -> jax.Array:
    """Computes `reference.norm_of_tiles` of `[tiles]` arrays in order; those of one length are folded together."""
    lengths = sorted({t.size for t in tiles})
    alike = {length: [i for i, t in enumerate(tiles) if t.size == length] for length in lengths}

    def norm_kernel(*refs):
        sums = {}
        for ref, members in zip(refs[:-1], alike.values(), strict=True):
            folded = fold_axis(ref[...], 1)
            sums |= {index: folded[place] for place, index in enumerate(members)}
        refs[-1][...] = jnp.sqrt(trees.chain(jnp.add, [sums[i] for i in range(len(tiles))]))

    stacks = [jnp.stack([tiles[i].reshape(-1) for i in members]) for members in alike.values()]
    return region_call("global_norm", norm_kernel, out_shape=jax.ShapeDtypeStruct((1,), jnp.float32))(*stacks)[0]
