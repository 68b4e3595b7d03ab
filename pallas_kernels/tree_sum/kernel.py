"""Tree order, one vector addition a level."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from isojax import trees
from isojax.layouts import CHUNK, round_up
from pallas_kernels.region import mosaic, region_call
from pallas_kernels.rows import row_op


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of `tree_sum`, never its bits."""

    block: int = 512  # Columns per program, a multiple of 128.


def fold_axis(x: jax.Array, axis: int) -> jax.Array:
    """`trees.fold(add, terms)` for the slices of `x` along `axis`, which stays with size 1. Used inside kernels.

    The tree that is cut at the largest power of two pairs neighbours at its lowest level and passes an odd
    last term up. Whole slices meet, so the compiler has no order to choose.
    """
    axis %= x.ndim
    while (count := x.shape[axis]) > 1:
        even = count // 2 * 2
        pairs = lax.slice_in_dim(x, 0, even, 2, axis) + lax.slice_in_dim(x, 1, even, 2, axis)
        rest = [lax.slice_in_dim(x, even, count, 1, axis)] if even < count else []
        x = lax.concatenate([pairs, *rest], axis) if rest else pairs
    return x


def tree_sum(parts: Float[Array, "parts width"], schedule: Schedule) -> Float[Array, " width"]:
    """Computes `reference.tree_sum`, one block of columns per program."""
    count, width = parts.shape
    block = min(schedule.block, round_up(width, 128))
    padded = jnp.pad(parts, ((0, 0), (0, -width % block)))

    def tree_sum_kernel(
        parts_ref,  # [parts, block]
        sum_ref,  # [block]
    ):
        sum_ref[...] = fold_axis(parts_ref[...].astype(jnp.float32), 0)[0].astype(sum_ref.dtype)

    def on_gpu(parts):
        terms = [term.reshape(-1, block) for term in parts]
        out = jax.ShapeDtypeStruct(terms[0].shape, parts.dtype)
        return mosaic().row_call("tree_sum", fold_terms, terms, (), [out], block=1)(*terms)[0].reshape(-1)

    def fold_terms(*terms):
        return [trees.fold(jnp.add, [term.astype(jnp.float32) for term in terms]).astype(parts.dtype)]

    return region_call(
        "tree_sum",
        tree_sum_kernel,
        out_shape=jax.ShapeDtypeStruct(padded.shape[1:], parts.dtype),
        gpu=on_gpu,
        grid=(padded.shape[1] // block,),
        in_specs=[pl.BlockSpec((count, block), lambda i: (0, i))],
        out_specs=pl.BlockSpec((block,), lambda i: (i,)),
    )(padded)[:width]


_block_sums = row_op("sum_tokens", lambda values: fold_axis(values, 1))


def block_sums(values: Float[Array, " rows"]) -> Float[Array, " blocks"]:
    """The sum of every 64 rows in tree order; rows that are missing count as zero."""
    padded = jnp.pad(values, (0, -values.shape[0] % CHUNK))
    return _block_sums(padded.reshape(-1, CHUNK))[:, 0]
