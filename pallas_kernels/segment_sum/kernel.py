"""Computes `segment_sum` with one accumulator a sequence."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from isojax import trees
from isojax.layouts import Segments, round_up
from pallas_kernels import mosaic
from pallas_kernels.region import region_call


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of `segment_sum`, never its bits."""

    block: int = 1024  # Columns per program, a multiple of 128.


def segment_sum(
    partials: Float[Array, "blocks width"], segments: Segments, schedule: Schedule
) -> Float[Array, " width"]:
    """Computes `reference.segment_sum`, one block of columns per program."""
    blocks, width = partials.shape
    block = min(schedule.block, round_up(width, 128))
    padded = jnp.pad(partials, ((0, 0), (0, -width % block)))

    def segment_sum_kernel(
        sequence_ref,  # [blocks]
        partials_ref,  # [blocks, block]
        sum_ref,  # [block]
    ):
        def add(b, sums):
            index = sequence_ref[b]
            term = partials_ref[pl.ds(b, 1), :].astype(jnp.float32)
            total = lax.dynamic_slice(sums, (index, 0), (1, block)) + term
            return lax.dynamic_update_slice(sums, total, (index, 0))

        sums = lax.fori_loop(0, blocks, add, jnp.zeros((segments.count, block), jnp.float32))
        sum_ref[...] = trees.fold(jnp.add, list(sums)).astype(sum_ref.dtype)

    def hopper_kernel(sequence_ref, partials_ref, sum_ref):
        columns = pl.ds(lax.axis_index("columns") * block, block)

        def add(b, sums):
            index = sequence_ref[b]
            piece = partials_ref.at[b, columns]
            term = plgpu.load(piece, layout=mosaic.layout((block,)), optimized=False).astype(jnp.float32)
            return tuple(jnp.where(index == s, total + term, total) for s, total in enumerate(sums))

        zeros = plgpu.layout_cast(jnp.zeros(block, jnp.float32), mosaic.layout((block,)))
        sums = lax.fori_loop(0, blocks, add, (zeros,) * segments.count)
        sum_ref[columns] = trees.fold(jnp.add, sums).astype(sum_ref.dtype)

    out_shape = jax.ShapeDtypeStruct(padded.shape[1:], partials.dtype)
    programs = padded.shape[1] // block
    return region_call(
        "segment_sum",
        segment_sum_kernel,
        out_shape=out_shape,
        gpu=mosaic.kernel("segment_sum", hopper_kernel, out_shape, columns=programs),
        grid=(programs,),
        in_specs=[pl.BlockSpec((blocks,), lambda i: (0,)), pl.BlockSpec((blocks, block), lambda i: (0, i))],
        out_specs=pl.BlockSpec((block,), lambda i: (i,)),
    )(segments.sequence, padded)[:width]
