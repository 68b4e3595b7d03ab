"""The grouped products on the CPU: one program walks over tiles of 16 pairs."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from isojax import trees
from isojax.layouts import block_of, round_up
from pallas_kernels import tile
from pallas_kernels.experts.plan import TILE, Plan
from pallas_kernels.region import region_call


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of `grouped_linear`, never its bits."""

    tiles: int = 256  # Tiles that one program walks over.
    columns: int = 128  # Columns of one product: 64 or 128.


def product(
    name: str,
    x: Float[Array, "pairs inputs"],
    weight: Float[Array, "experts rows columns"],
    plan: Plan,
    schedule: Schedule,
    *,
    contract: int,
) -> Float[Array, "pairs outputs"]:
    """Every pair times the weight of its expert over axis `contract` of a weight [rows, columns].

    The sum is a chain over blocks of `layouts.block_of` of the summed axis, in float32, rounded once.
    """
    pairs, depth = x.shape
    width = weight.shape[3 - contract]
    block, columns = block_of(depth), min(schedule.columns, block_of(width))
    tiles = min(schedule.tiles, pairs // TILE)
    programs = -(-pairs // (TILE * tiles))
    x = _pad(x, (programs * tiles * TILE, round_up(depth, block)))
    side = {contract: round_up(depth, block), 3 - contract: round_up(width, columns)}
    weight = _pad(weight, (weight.shape[0], side[1], side[2]))
    tile_expert = _pad(plan.tile_expert, (programs * tiles,))
    tile_pairs = _pad(plan.tile_pairs, (programs * tiles,))

    def product_kernel(
        expert_ref,  # [tiles]
        pairs_ref,  # [tiles]
        x_ref,  # [tiles · 16, depth]
        weight_ref,  # [experts, rows, columns], not cut into blocks
        out_ref,  # [tiles · 16, width]
    ):
        def one_tile(t, _):
            rows = pl.ds(t * TILE, TILE)
            expert = expert_ref[t]

            def one_column(j, _):
                across = pl.ds(j * columns, columns)

                def add(k, total):
                    along = pl.ds(k * block, block)
                    place = (across, along) if contract == 2 else (along, across)
                    return total + tile.dot(x_ref[rows, along], weight_ref[expert, *place], contract=(1, contract - 1))

                total = lax.fori_loop(0, x_ref.shape[1] // block, add, jnp.zeros((TILE, columns), jnp.float32))
                real = lax.broadcasted_iota(jnp.int32, total.shape, 0) < pairs_ref[t]
                out_ref[rows, across] = jnp.where(real, total, 0.0).astype(out_ref.dtype)

            lax.fori_loop(0, out_ref.shape[1] // columns, one_column, None)

        # Dead tiles are written too, with the zeros of a tile without pairs.
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)
        live = jnp.sum((pairs_ref[...] > 0).astype(jnp.int32))
        lax.fori_loop(0, live, one_tile, None)

    out = region_call(
        name,
        product_kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], side[3 - contract]), x.dtype),
        grid=(programs,),
        in_specs=[
            pl.BlockSpec((tiles,), lambda i: (i,)),
            pl.BlockSpec((tiles,), lambda i: (i,)),
            pl.BlockSpec((tiles * TILE, x.shape[1]), lambda i: (i, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec((tiles * TILE, side[3 - contract]), lambda i: (i, 0)),
    )(tile_expert, tile_pairs, x, weight)
    return out[:pairs, :width]


def weight_gradient(
    name: str,
    out_grad: Float[Array, "pairs outputs"],
    x: Float[Array, "pairs inputs"],
    plan: Plan,
) -> Float32[Array, "experts outputs inputs"]:
    """Σ over the pairs of each expert of `out_grad[pair] ⊗ x[pair]`, in float32.

    A sequence's pairs form a chain of 16-pair products from zero, in row order; the sequences meet in
    tree order, absent ones as zero.
    """
    outputs, inputs = out_grad.shape[1], x.shape[1]
    tile_out, tile_in = block_of(outputs), block_of(inputs)
    out_grad = _pad(out_grad, (x.shape[0], round_up(outputs, tile_out)))
    x = _pad(x, (x.shape[0], round_up(inputs, tile_in)))
    grid = (plan.num_experts, out_grad.shape[1] // tile_out, x.shape[1] // tile_in)

    def weight_gradient_kernel(
        first_ref,  # [groups + 1]
        pairs_ref,  # [tiles]
        out_grad_ref,  # [pairs, outputs], not cut into blocks
        x_ref,  # [pairs, inputs], not cut into blocks
        grad_ref,  # [1, tile_out, tile_in]
    ):
        def add(t, total):
            rows = pl.ds(t * TILE, TILE)
            # Pads may hold anything: 0 · NaN would reach every weight.
            real = lax.broadcasted_iota(jnp.int32, (TILE, 1), 0) < pairs_ref[t]
            left = jnp.where(real, out_grad_ref[rows, pl.ds(i * tile_out, tile_out)], 0)
            right = jnp.where(real, x_ref[rows, pl.ds(j * tile_in, tile_in)], 0)
            return total + tile.dot(left, right, contract=(0, 0))

        i, j = pl.program_id(1), pl.program_id(2)
        group = pl.program_id(0) * plan.num_sequences
        sums = [
            lax.fori_loop(
                first_ref[group + s], first_ref[group + s + 1], add, jnp.zeros(grad_ref.shape[1:], jnp.float32)
            )
            for s in range(plan.num_sequences)
        ]
        grad_ref[0] = trees.fold(jnp.add, sums)

    return region_call(
        name,
        weight_gradient_kernel,
        out_shape=jax.ShapeDtypeStruct((plan.num_experts, out_grad.shape[1], x.shape[1]), jnp.float32),
        grid=grid,
        in_specs=[
            pl.BlockSpec(plan.first_tile.shape, lambda e, i, j: (0,)),
            pl.BlockSpec(plan.tile_pairs.shape, lambda e, i, j: (0,)),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec((1, tile_out, tile_in), lambda e, i, j: (e, i, j)),
    )(plan.first_tile, plan.tile_pairs, out_grad, x)[:, :outputs, :inputs]


def _pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, size - have) for size, have in zip(shape, x.shape, strict=True)])
