"""The products of a linear layer on Hopper: wgmma tiles, a chain for each split, the tree over splits in registers.

Measured on one H200: bits do not depend on anything in `HopperSchedule` (benchmarks/hopper_linear.py).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from isojax.layouts import round_up

_PROCESSORS = 132  # Streaming multiprocessors of an H100 or H200: programs of the persistent grid.
_WARPGROUP_ROWS = 64  # Rows of one wgmma, and of a staged store.
_STORE = 64  # Columns of one staged store.
_REGISTER_COLUMNS = 64  # Wider tiles hold two partial sums in registers; the third waits in shared memory.


@dataclasses.dataclass(frozen=True, slots=True)
class HopperSchedule:
    """May change the speed of a product on Hopper, never its bits.

    Attributes:
        warpgroups: Warpgroups that compute, `rows` rows of a tile each.
        columns: Columns of a tile: 16, 32, 64 or 128.
        depth: K of one step: 64, 128 or 256.
        stages: Steps in flight.
        rows: Rows of a warpgroup: 64, or 128, whose registers hold one split alone.
        snake: Minor axis (0 rows, 1 columns) and width of the order in which tiles are visited.
    """

    warpgroups: int = 2
    columns: int = 128
    depth: int = 64
    stages: int = 4
    snake: tuple[int, int] = (0, 2)
    rows: int = _WARPGROUP_ROWS

    @classmethod
    def for_shape(cls, rows: int, columns: int, num_splits: int, dtype: jnp.dtype) -> "HopperSchedule":
        """The fastest measured (benchmarks/results/hopper_linear.json).

        A decode step is bound by the weights: tiles just narrow enough that no processor takes two, and long steps.
        Many rows and one split leave registers for 128 rows a warpgroup, where that fills the processors.
        """
        if rows <= _WARPGROUP_ROWS:
            stages = {16: 5, 32: 4, 64: 3}
            width = next((w for w in stages if columns <= w * _PROCESSORS), 64)
            return cls(warpgroups=1, columns=width, depth=256, stages=stages[width])
        tall = cls(snake=(1, 16), rows=2 * _WARPGROUP_ROWS)
        fills = rows * columns >= _PROCESSORS * tall.warpgroups * tall.rows * tall.columns
        # Results of four bytes leave no shared memory for its four stages.
        if fills and num_splits == 1 and jnp.dtype(dtype).itemsize == 2:
            return tall
        return cls(snake=(1, 8) if columns > 4096 else (0, 4))


def product(
    lhs: BFloat16[Array, "rows depth"],
    rhs: BFloat16[Array, "columns depth"],
    num_splits: int,
    dtype: jnp.dtype,
    schedule: HopperSchedule,
) -> Float[Array, "rows columns"]:
    """`reference.product` of operands whose splits lie one after another on the last axis, K-major both.

    Raises:
        ValueError: If a split is not a multiple of 16, the depth of one wgmma.
    """
    rows, columns = lhs.shape[0], rhs.shape[0]
    split_depth = lhs.shape[1] // num_splits
    if split_depth % 16:
        raise ValueError(f"a Hopper product takes splits of a multiple of 16, got {split_depth}: pad them with zeros")
    depth = next(d for d in (schedule.depth, 128, 64, 32, 16) if d <= schedule.depth and split_depth % d == 0)
    tile = (schedule.rows * schedule.warpgroups, min(schedule.columns, round_up(columns, 16)))
    lhs, rhs = (jnp.pad(x, ((0, -x.shape[0] % side), (0, 0))) for x, side in zip((lhs, rhs), tile, strict=True))
    tiles = (lhs.shape[0] // tile[0], rhs.shape[0] // tile[1])
    steps = lhs.shape[1] // depth
    stages = min(schedule.stages, steps)
    programs = min(_PROCESSORS, tiles[0] * tiles[1])
    parked = num_splits == 8 and tile[1] > _REGISTER_COLUMNS
    store = min(_STORE, tile[1])

    def body(lhs_ref, rhs_ref, out_ref):
        pl.run_scoped(
            functools.partial(_program, lhs_ref, rhs_ref, out_ref, tiles, num_splits, steps, schedule),
            lhs_ring=_shared((stages, tile[0], depth), lhs.dtype),
            rhs_ring=_shared((stages, tile[1], depth), rhs.dtype),
            staging=_shared((schedule.warpgroups, 2, _WARPGROUP_ROWS, store), dtype),
            park=_shared((schedule.warpgroups, _WARPGROUP_ROWS, tile[1]), jnp.float32) if parked else None,
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=schedule.warpgroups, num_barriers=stages),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[0]), dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=schedule.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(lhs, rhs)[:rows, :columns]


def _program(
    lhs_ref, rhs_ref, out_ref, tiles, num_splits, steps, schedule, *, lhs_ring, rhs_ring, staging, park, full, empty
):
    """One persistent program: a warpgroup copies, the others compute, through a ring of shared memory."""
    warpgroup = lax.axis_index("warpgroup")
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    count = lax.div(tiles[0] * tiles[1] - program + programs - 1, programs)
    stages, tile_rows, depth = lhs_ring.shape
    tile_columns = rhs_ring.shape[1]

    def corner(index):
        row, column = plgpu.planar_snake(program + index * programs, tiles, *schedule.snake)
        return pl.ds(row * tile_rows, tile_rows), pl.ds(column * tile_columns, tile_columns)

    def copy():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, count)
        def _tile(index):
            row, column = corner(index)

            @pl.loop(0, steps)
            def _step(step):
                number = index * steps + step
                slot = lax.rem(number, stages)

                @pl.when(number >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                k = pl.ds(step * depth, depth)
                plgpu.copy_gmem_to_smem(lhs_ref.at[row, k], lhs_ring.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(rhs_ref.at[column, k], rhs_ring.at[slot], full.at[slot])

    def compute():
        plgpu.set_max_registers(232, action="increase")
        own = pl.ds(warpgroup * schedule.rows, schedule.rows)
        split_steps = steps // num_splits
        # Always zero; a trip count that the compiler cannot fold keeps short splits a loop, and registers unspilled.
        opaque = lax.rem(program * (program + 1), 2)

        def split(index, number):
            """The chain of one split: its steps in order, into a fresh accumulator."""

            def run(accumulator):
                def step(s, carry):
                    slot = lax.rem(index * steps + number * split_steps + s, stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(accumulator, lhs_ring.at[slot, own], rhs_ring.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])
                    return carry

                lax.fori_loop(0, split_steps + opaque, step, ())
                return accumulator[...]

            return pl.run_scoped(run, plgpu.ACC((schedule.rows, tile_columns), jnp.float32))

        @pl.loop(0, count)
        def _tile(index):
            # The tree as a binary counter: level l holds the sum of 2^l splits until its sibling is there.
            levels = {}
            for number in range(num_splits):
                total, level = split(index, number), 0
                while (number >> level) & 1:
                    held = levels.pop(level)
                    if held is None:
                        held = plgpu.layout_cast(park[warpgroup], plgpu.Layout.WGMMA)
                    # The barrier ends the lives of both operands; without it the compiler spills them.
                    total = lax.optimization_barrier(held + total)
                    level += 1
                if level == 2 and park is not None and number != num_splits - 1:
                    park[warpgroup] = total
                    total = None
                levels[level] = total
            (total,) = levels.values()
            row, column = corner(index)
            _store(total.astype(out_ref.dtype), out_ref.at[row, column].at[own], staging.at[warpgroup])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(warpgroup < schedule.warpgroups, compute, copy)


def _store(total, out_ref, staging):
    """Writes a warpgroup's tile through two staging buffers in turn."""
    _, height, width = staging.shape
    corners = [(r, c) for r in range(0, total.shape[0], height) for c in range(0, total.shape[1], width)]
    for number, (row, column) in enumerate(corners):
        slot = number % 2
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        staging[slot] = total[row : row + height, column : column + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging.at[slot], out_ref.at[pl.ds(row, height), pl.ds(column, width)])


def _shared(shape, dtype):
    """Shared memory whose last two axes are laid out for wgmma and the copy engine."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
