"""The products of a linear layer on the CPU, tile by tile."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from isojax import trees
from isojax.layouts import CHUNK, Segments, round_up
from pallas_kernels import tile
from pallas_kernels.linear.numerics import Schedule
from pallas_kernels.region import region_call


def product(
    name: str,
    lhs: Float[Array, "rows splits depth"],
    rhs: Float[Array, "columns splits depth"],
    blocks: Sequence[int],
    dtype: jnp.dtype,
    schedule: Schedule,
) -> Float[Array, "rows columns"]:
    """Computes `reference.product`, rounded once to `dtype`: one output tile per program."""
    rows, splits, depth = lhs.shape
    columns = rhs.shape[0]
    tile_rows = schedule.row_tile(rows)
    tile_columns = min(schedule.columns, round_up(columns, 16))
    lhs = _pad_leading(lhs, tile_rows)
    rhs = _pad_leading(rhs, tile_columns)
    # Loops wherever there is more than one: they compile one product, not all.
    runs = [(block, len(list(run))) for block, run in itertools.groupby(blocks)]

    def product_kernel(
        lhs_ref,  # [tile_rows, splits, depth]
        rhs_ref,  # [tile_columns, splits, depth]
        out_ref,  # [tile_rows, tile_columns]
    ):
        def split(s):
            total, start = jnp.zeros(out_ref.shape, jnp.float32), 0
            for block, count in runs:

                def add(i, total, start=start, block=block):
                    along = pl.ds(start + i * block, block)
                    return total + tile.dot(lhs_ref[:, s, along], rhs_ref[:, s, along])

                total = lax.fori_loop(0, count, add, total) if count > 1 else add(0, total)
                start += count * block
            return total

        sums = lax.map(split, jnp.arange(splits)) if splits > 1 else [split(0)]
        out_ref[...] = trees.fold(jnp.add, list(sums)).astype(dtype)

    return region_call(
        name,
        product_kernel,
        gpu=functools.partial(_on_hopper, dtype=dtype, schedule=schedule) if lhs.dtype == jnp.bfloat16 else None,
        out_shape=jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[0]), dtype),
        grid=(lhs.shape[0] // tile_rows, rhs.shape[0] // tile_columns),
        in_specs=[
            pl.BlockSpec((tile_rows, splits, depth), lambda i, j: (i, 0, 0)),
            pl.BlockSpec((tile_columns, splits, depth), lambda i, j: (j, 0, 0)),
        ],
        out_specs=pl.BlockSpec((tile_rows, tile_columns), lambda i, j: (i, j)),
    )(lhs, rhs)[:rows, :columns]


def weight_gradient(
    name: str,
    out_grad: Float[Array, "rows outputs"],
    x: Float[Array, "rows inputs"],
    segments: Segments,
    schedule: Schedule,
) -> Float[Array, "outputs inputs"]:
    """Σ over rows of `out_grad[row] ⊗ x[row]`, float32: 64-row products, a chain in each sequence, a fold over them."""
    outputs, inputs = out_grad.shape[1], x.shape[1]
    side = schedule.columns
    tile_out, tile_in = min(side, round_up(outputs, 16)), min(side, round_up(inputs, 16))
    blocks = segments.sequence.shape[0]
    out_grad = _pad_to(out_grad, blocks * CHUNK, round_up(outputs, tile_out))
    x = _pad_to(x, blocks * CHUNK, round_up(inputs, tile_in))

    def weight_gradient_kernel(
        sequence_ref,  # [blocks]
        out_grad_ref,  # [rows, tile_out]
        x_ref,  # [rows, tile_in]
        grad_ref,  # [tile_out, tile_in]
    ):
        def add(b, sums):
            rows = pl.ds(b * CHUNK, CHUNK)
            term = tile.dot(out_grad_ref[rows, :], x_ref[rows, :], contract=(0, 0))
            index = (sequence_ref[b], 0, 0)
            total = lax.dynamic_slice(sums, index, (1, *term.shape)) + term
            return lax.dynamic_update_slice(sums, total, index)

        sums = lax.fori_loop(0, blocks, add, jnp.zeros((segments.count, tile_out, tile_in), jnp.float32))
        grad_ref[...] = trees.fold(jnp.add, list(sums))

    return region_call(
        name,
        weight_gradient_kernel,
        out_shape=jax.ShapeDtypeStruct((out_grad.shape[1], x.shape[1]), jnp.float32),
        grid=(out_grad.shape[1] // tile_out, x.shape[1] // tile_in),
        in_specs=[
            pl.BlockSpec((blocks,), lambda i, j: (0,)),
            pl.BlockSpec((blocks * CHUNK, tile_out), lambda i, j: (0, i)),
            pl.BlockSpec((blocks * CHUNK, tile_in), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((tile_out, tile_in), lambda i, j: (i, j)),
    )(segments.sequence, out_grad, x)[:outputs, :inputs]


def _on_hopper(lhs, rhs, *, dtype, schedule: Schedule):
    from pallas_kernels.linear import hopper  # Mosaic GPU is imported where it runs.

    rows, splits, _ = lhs.shape
    flat = (x.reshape(x.shape[0], -1) for x in (lhs, rhs))
    chosen = schedule.hopper or hopper.HopperSchedule.for_shape(rows, rhs.shape[0], splits, dtype)
    return hopper.product(*flat, splits, dtype, chosen)


def _pad_leading(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, [(0, -x.shape[0] % multiple)] + [(0, 0)] * (x.ndim - 1))


def _pad_to(x: jax.Array, rows: int, columns: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))
