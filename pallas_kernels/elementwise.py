"""Elementwise arithmetic whose bits do not depend on the block it lies in, and regions of it over flat blocks."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from isojax.layouts import round_up
from pallas_kernels.region import mosaic, region_call, traced_for

_LANES = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of an elementwise region, never its bits."""

    rows: int = 64  # Rows of a block.
    width: int = 1024  # Columns of a block, a multiple of 128.
    gpu_rows: int = 1  # Rows of a program on a GPU.


def elementwise(
    name: str,
    fn: Callable[..., tuple[jax.Array, ...]],
    arrays: Sequence[jax.Array],
    scalars: jax.Array | None = None,
    *,
    out_dtypes: Sequence[DTypeLike],
    schedule: Schedule = Schedule(),
) -> tuple[jax.Array, ...]:
    """Runs `fn` on every element of `arrays`, which have one shape, as the region `name`.

    Where `fn` adds to a product it goes through `region.exact_product`, and where it divides by something of
    another shape through `exact_quotient`: then an element's bits depend on its inputs alone.

    Args:
        name: The region.
        fn: Takes a block of each array, then `scalars` where given, and returns a tuple of blocks.
        arrays: At least one array.
        scalars: A vector that every block sees whole.
        out_dtypes: The dtype of each result.
        schedule: How the elements are cut into blocks.

    Returns:
        One array of the common shape for every dtype.
    """
    shape, size = arrays[0].shape, arrays[0].size
    width = min(schedule.width, round_up(size, _LANES))
    rows = -(-size // width)
    block = min(schedule.rows, rows)
    rows = round_up(rows, block if traced_for() == "cpu" else 1)
    shared = () if scalars is None else (scalars,)
    out_shape = [jax.ShapeDtypeStruct((rows, width), dtype) for dtype in out_dtypes]
    flat = [jnp.pad(x.reshape(-1), (0, rows * width - size)).reshape(rows, width) for x in arrays]

    def elementwise_kernel(*refs):
        inputs, outputs = refs[: len(arrays) + len(shared)], refs[len(arrays) + len(shared) :]
        for ref, value in zip(outputs, fn(*(ref[...] for ref in inputs)), strict=True):
            ref[...] = value

    def on_gpu(*args):
        return mosaic().row_call(name, fn, flat, shared, out_shape, block=schedule.gpu_rows)(*args)

    blocks = pl.BlockSpec((block, width), lambda i: (i, 0))
    results = region_call(
        name,
        elementwise_kernel,
        out_shape=out_shape,
        gpu=on_gpu,
        grid=(rows // block,),
        in_specs=[blocks] * len(arrays) + [pl.BlockSpec(s.shape, lambda i: (0,)) for s in shared],
        out_specs=[blocks] * len(out_dtypes),
    )(*flat, *shared)
    return tuple(out.reshape(-1)[:size].reshape(shape) for out in results)


def exact_quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` for every element of `a`, rounded once. Used inside kernels, as `region.exact_product`.

    XLA turns a division by a broadcast `b` into a product with 1/b (on the CPU 644 of 4,500 elements differ, measured),
    but not where `b` happens to have the shape of `a`, and (a/b)/c into a/(b·c) (875 of 2,310 elements differ).
    """
    return lax.optimization_barrier(a / lax.optimization_barrier(jnp.broadcast_to(b, a.shape)))
