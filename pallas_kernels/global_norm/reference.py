"""The definition of `global_norm`."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from isojax import trees


def tile_sums(x: Float[Array, "rows columns"], tile: tuple[int, int]) -> Float32[Array, "tile_rows tile_columns"]:
    """Σx² of each tile, in float32: a tree over the columns of a row, then a tree over rows."""
    squares = np.square(np.asarray(x, np.float32)).reshape(x.shape[0] // tile[0], tile[0], -1, tile[1])
    by_row = trees.fold(np.add, list(np.moveaxis(squares, 3, 0)))
    return jnp.asarray(trees.fold(np.add, list(np.moveaxis(by_row, 1, 0))))


def norm_of_tiles(tiles: Mapping[str, Float32[Array, "*tiles"]]) -> Float32[Array, ""]:
    """The root of a chain over tensors, by name, of trees over the tiles of a tensor, row-major."""
    sums = [trees.fold(np.add, list(np.asarray(tiles[name]).reshape(-1))) for name in sorted(tiles)]
    return jnp.sqrt(trees.chain(np.add, sums))
