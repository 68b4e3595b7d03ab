"""Row functions on Hopper: one row a warpgroup at a time, the body as `pallas_kernels.mosaic_rules` runs it.

The bits of a row cannot depend on how many rows there are or who computes them: layouts follow from its shape alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax import trees
from pallas_kernels.mosaic_rules import Part, Shaped, evaluate, layout, loaded, placed, squeezed


def row_call(
    name: str,
    fn: Callable[..., Sequence[jax.Array]],
    rows: Sequence[Shaped],
    shared: Sequence[Shaped],
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    block: int,
    num_sums: int = 0,
) -> Callable[..., Sequence[jax.Array]]:
    """Runs `fn` on every row, `block` rows a program.

    Args:
        name: The region.
        fn: Takes a row `[1, ...]` of each of `rows`, then `shared`, and returns rows `[1, ...]`; the last `num_sums`
            of them are added over the rows of a block, in a chain of ascending rows, in the dtype they have.
        rows: Arrays `[count, ...]`.
        shared: Arrays that all rows share.
        outs: The results `[count, ...]`; those that are sums `[blocks, ...]`, blocks beyond the rows being zero.
        block: Rows of a program.
        num_sums: Number of results that are sums.
    """
    count = rows[0].shape[0]
    of_rows = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in rows]
    program = jax.make_jaxpr(fn)(*of_rows, *shared)
    num_rows = len(outs) - num_sums

    def row_kernel(*refs):
        ins, results = refs[: len(rows) + len(shared)], refs[len(rows) + len(shared) :]
        index = lax.axis_index("block")
        first = index * block

        def row(r, sums):
            at = first + r
            parts = [Part.of(ref, x, at) for ref, x in zip(ins, rows, strict=False)]
            parts += [Part.of(ref, x) for ref, x in zip(ins[len(rows) :], shared, strict=True)]
            values = [loaded(v) for v in evaluate(program.jaxpr, program.consts, parts)]
            for ref, out, value in zip(results, outs, values[:num_rows], strict=False):
                _store(ref, out.shape, at, value)
            return tuple(placed(s + v) for s, v in zip(sums, values[num_rows:], strict=True))

        sums = outs[num_rows:]
        zeros = tuple(placed(jnp.zeros(squeezed(s.shape[1:]), s.dtype)) for s in sums)
        totals = lax.fori_loop(0, jnp.minimum(block, count - first), row, zeros)
        for ref, out, total in zip(results[num_rows:], sums, totals, strict=True):
            _store(ref, out.shape, index, total)

    programs = outs[-1].shape[0] if num_sums else -(-count // block)
    call = kernel(name, row_kernel, tuple(outs), block=programs)
    # Booleans in memory have no layout in Mosaic GPU.
    return lambda *args: call(*(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x for x in args))


def segment_sum(count: int, block: int, out: jax.ShapeDtypeStruct) -> Callable[..., jax.Array]:
    """(sequence `[blocks]`, partials `[blocks, width]`) -> `reference.segment_sum`, `block` columns a program."""

    def segment_sum_kernel(sequence_ref, partials_ref, sum_ref):
        columns = pl.ds(lax.axis_index("columns") * block, block)

        def add(b, sums):
            index = sequence_ref[b]
            term = plgpu.load(partials_ref.at[b, columns], layout=layout((block,)), optimized=False)
            return tuple(jnp.where(index == s, total + term.astype(jnp.float32), total) for s, total in enumerate(sums))

        zeros = (placed(jnp.zeros(block, jnp.float32)),) * count
        sums = lax.fori_loop(0, partials_ref.shape[0], add, zeros)
        sum_ref[columns] = trees.fold(jnp.add, sums).astype(sum_ref.dtype)

    return kernel("segment_sum", segment_sum_kernel, out, columns=out.shape[0] // block)


def kernel(name: str, body: Callable[..., None], out_shape, **grid: int) -> Callable[..., Any]:
    """A kernel over refs in device memory, one warpgroup a program; `grid` names its axes and their sizes."""
    return plgpu.kernel(
        body,
        out_type=out_shape,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name.replace(".", "_"),  # PTX has no dots in names.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _store(ref, shape: tuple[int, ...], row: jax.Array, value: jax.Array | np.ndarray) -> None:
    ref[row, *(0 if n == 1 else slice(None) for n in shape[1:])] = placed(value)
