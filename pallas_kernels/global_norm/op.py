"""The norm of all gradients, the same bits for every way of sharding them."""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from pallas_kernels.global_norm import kernel
from pallas_kernels.sharding import axis_size


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """What decides the bits of `global_norm`."""

    num_splits: int = 8  # An axis may be sharded over any number of ranks that divides this without cutting a tile.
    max_tile: int = 64  # Most rows and most columns of a tile, a power of two.


def global_norm(tree: Any, *, specs: Any = None, numerics: Numerics = Numerics()) -> Float32[Array, ""]:
    """The square root of the sum of the squares of all leaves, in float32.

    Squares are added in tiles of the last two axes (`tile_of`), the tiles of a tensor in tree order by their
    row-major index, tensors in a chain by sorted name. No tile crosses a shard, so ranks compute `tile_sums` of
    their shards, gather them and take `norm_of_tiles`.

    Args:
        tree: A nested dict or the state of an `nnx` module; leaves are named by their path.
        specs: Inside `shard_map`, the `PartitionSpec` of every leaf, or of whole branches as for `in_specs`; leaves
            are then those of this rank, and every rank gets the norm of all. By default all leaves are whole.
        numerics: What decides bits.

    Raises:
        ValueError: If there are no leaves, or a shard cuts a tile.
    """
    if not (leaves := _named(tree)):
        raise ValueError("global_norm got no leaves: pass the gradients of the parameters that are trained")
    if specs is None:
        return _global_norm(leaves, numerics)
    by_leaf = jax.tree.broadcast(specs, tree, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return _norm_of_shards(leaves, _named(by_leaf, is_leaf=lambda spec: isinstance(spec, PartitionSpec)), numerics)


def tile_of(shape: tuple[int, ...], numerics: Numerics = Numerics()) -> tuple[int, int]:
    """Rows and columns of the tiles of a tensor of global `shape`.

    Of each of the last two axes the largest power of two up to `max_tile` that divides all its shards.
    """
    rows, columns = (1, 1, *shape)[-2:]

    def side(size: int) -> int:
        shard = size // math.gcd(size, numerics.num_splits)
        return min(shard & -shard, numerics.max_tile)

    return side(rows), side(columns)


def tile_sums(
    x: Float[Array, "*shape"], *, global_shape: tuple[int, ...] | None = None, numerics: Numerics = Numerics()
) -> Float32[Array, "*tiles"]:
    """The sum of the squares of each tile of `x`, in the place of its tile.

    Args:
        x: A tensor or a shard of one.
        global_shape: Of the tensor that `x` is a shard of; by default of `x`.
        numerics: What decides bits.

    Returns:
        `[*leading, rows / tile rows, columns / tile columns]`: concatenated as the shards are, these are the
        tiles of the tensor.

    Raises:
        ValueError: If the shard cuts a tile.
    """
    tile = tile_of(x.shape if global_shape is None else global_shape, numerics)
    *leading, rows, columns = (1,) * (2 - x.ndim) + x.shape
    if rows % tile[0] or columns % tile[1]:
        raise ValueError(
            f"global_norm adds tiles of {tile[0]} x {tile[1]} of {global_shape}, which a shard of {x.shape} cuts: shard"
            f" over a number of ranks that divides num_splits={numerics.num_splits}"
        )
    sums = kernel.tile_sums(x.reshape(-1, columns), tile)
    return sums.reshape(*leading, rows // tile[0], columns // tile[1])


def norm_of_tiles(tiles: Mapping[str, Float32[Array, "*tiles"]]) -> Float32[Array, ""]:
    """The norm of the tensors whose `tile_sums`, of the whole tensors, are given by name.

    Raises:
        ValueError: If there are none.
    """
    if not tiles:
        raise ValueError("global_norm got no leaves: pass the gradients of the parameters that are trained")
    return kernel.norm_of_tiles([tiles[name] for name in sorted(tiles)])


# Compiled once for a tree of shapes, also where it is called step by step outside a jit.
@functools.partial(jax.jit, static_argnums=1)
def _global_norm(leaves: dict[str, jax.Array], numerics: Numerics) -> jax.Array:
    """Tensors of one tile and width go through one region: tiles do not know their neighbours."""
    alike, tiles = collections.defaultdict(list), {}
    for name, leaf in leaves.items():
        alike[tile_of(leaf.shape, numerics), (1, *leaf.shape)[-1], leaf.dtype].append(name)
    for (tile, width, _), names in alike.items():
        rows = [leaves[name].reshape(-1, width) for name in names]
        sums = kernel.tile_sums(jnp.concatenate(rows) if len(rows) > 1 else rows[0], tile)
        start = 0
        for name, part in zip(names, rows, strict=True):
            end = start + part.shape[0] // tile[0]
            tiles[name], start = sums[start:end], end
    return norm_of_tiles(tiles)


def _norm_of_shards(
    leaves: dict[str, jax.Array], specs: dict[str, PartitionSpec], numerics: Numerics
) -> Float32[Array, ""]:
    """The norm of tensors that lie on ranks: tiles are gathered along the axes that their tensor is cut along."""
    tiles = {}
    for name, leaf in leaves.items():
        axes = (*specs[name], *(None,) * (leaf.ndim - len(specs[name])))
        shape = tuple(n * axis_size(axis) for n, axis in zip(leaf.shape, axes, strict=True))
        tiles[name] = tile_sums(leaf, global_shape=shape, numerics=numerics)
        for place, axis in enumerate(axes, tiles[name].ndim - leaf.ndim):
            if axis is not None:
                tiles[name] = lax.all_gather(tiles[name], axis, axis=place, tiled=True)
    return norm_of_tiles(tiles)


def _named(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """Leaves by path; the state of a module, whose variables end in `.value`, has the names of the plain dict."""
    names = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(_without_value(path), simple=True, separator="."): leaf for path, leaf in names}


def _without_value(path):
    is_variable = path and path[-1] == jax.tree_util.GetAttrKey("value")
    return path[:-1] if is_variable else path
