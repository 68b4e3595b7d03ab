"""Computes `segment_sum` with one accumulator a sequence."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from isojax import trees
from isojax.layouts import Segments, round_up
from pallas_kernels.region import mosaic, region_call


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

    def on_gpu(*args):
        return mosaic().segment_sum(segments.count, block, out_shape)(*args)

    out_shape = jax.ShapeDtypeStruct(padded.shape[1:], partials.dtype)
    return region_call(
        "segment_sum",
        segment_sum_kernel,
        out_shape=out_shape,
        gpu=on_gpu,
        grid=(padded.shape[1] // block,),
        in_specs=[pl.BlockSpec((blocks,), lambda i: (0,)), pl.BlockSpec((blocks, block), lambda i: (0, i))],
        out_specs=pl.BlockSpec((block,), lambda i: (i,)),
    )(segments.sequence, padded)[:width]
