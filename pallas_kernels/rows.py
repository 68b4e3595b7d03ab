"""Row-wise ops: a function of one row, run over blocks of rows, with its gradient.

Most regions of a language model are row-wise: norms, gates, rotations, casts, residual adds.
Their definition is a plain `jnp` function over a block of rows; `row_op` turns it into a
region whose bits do not depend on how many rows there are, and derives the backward region.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from isojax import trees
from isojax.layouts import CHUNK, Segments, round_up, split_bounds
from pallas_kernels.region import mosaic, region_call, traced_for
from pallas_kernels.segment_sum import segment_sum
from pallas_kernels.sharding import AxisName, rows_of_all

_BLOCK = CHUNK  # Rows of a block decide bits on the CPU (blocks of 8 and 64 rows differ): one block for every case.


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of a row-wise op on a GPU, never its bits; the CPU has one block for every case."""

    gpu_rows: int = 1  # Rows that a program takes one after another.


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What of a row op is known when it is traced."""

    name: str
    fn: Callable[..., Any]  # (*rows, *shared) -> rows or a tuple of rows
    num_shared: int
    per_head: bool
    constants: frozenset[int]  # Positions of float rows that get no gradient.

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        out = self.fn(*args)
        return out if isinstance(out, tuple) else (out,)

    def as_read(self, rows, shared) -> tuple[jax.Array, ...]:
        """What is shared, as `fn` takes it."""
        return tuple(jnp.broadcast_to(w, (rows[0].shape[1], *w.shape)) for w in shared) if self.per_head else shared


def row_op(
    name: str,
    fn: Callable[..., Any],
    *,
    num_shared: int = 0,
    per_head: bool = False,
    constants: Collection[int] = (),
) -> Callable[..., Any]:
    """Makes a row-wise region of `fn`.

    Args:
        name: The region's name; its backward is called `{name}.backward`.
        fn: Takes blocks `[rows, ...]` and then `num_shared` arrays that all rows share, and
            returns one block `[rows, ...]` or a tuple of them. Row r of the result depends on
            row r of the blocks alone. Integer and boolean blocks are allowed, as arguments and
            as results, and have no gradient.
        num_shared: Number of trailing arguments shared by all rows (weights). Their gradient is
            a sum over rows: one partial in each 64-row block, then the order of `segment_sum`.
            Integers among them have none.
        per_head: Whether rows are `[rows, heads, width]` and every head reads what is shared: `fn` gets a copy for each
            head, `[heads, ...]`. The partial of a block then adds rows head by head, and the heads by `head_sum`: were
            heads to meet after the sequences, two micro-batches would add in another order than one (measured).
        constants: Positions of float blocks that get no gradient (tables, temperatures).

    Returns:
        `op(*rows, *shared, segments=None, axis_name=None, schedule=Schedule())` over any number of rows. With
        `axis_name` they are those of one rank of that mesh axis (its heads, if `per_head`), `segments` are of all
        ranks, and every rank gets the gradient of what is shared, summed over all.
    """
    spec = _Spec(name, fn, num_shared, per_head, frozenset(constants))

    def op(
        *args: jax.Array,
        segments: Segments | None = None,
        axis_name: AxisName | None = None,
        schedule: Schedule = Schedule(),
    ):
        rows = args[: len(args) - num_shared]
        shared = args[len(args) - num_shared :]
        if num_shared:
            all_rows = rows_of_all(name, rows[0].shape[0], None if per_head else axis_name)
            segments = segments or Segments.one(all_rows)
        out = _row_op(spec, schedule, axis_name, rows, shared, segments if num_shared else None)
        return out if len(out) > 1 else out[0]

    return functools.wraps(fn)(op)


def rowwise(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An op of one's own: `fn` in `jnp` over blocks of rows, as a region with its gradient; a decorator of `row_op`."""
    return row_op(fn.__name__, fn)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _row_op(spec: _Spec, schedule: Schedule, axis_name: AxisName | None, rows, shared, segments):
    del axis_name, segments
    count, shared = rows[0].shape[0], spec.as_read(rows, shared)
    blocks = [jax.ShapeDtypeStruct((_BLOCK, *x.shape[1:]), x.dtype) for x in rows]
    outs = jax.eval_shape(spec, *blocks, *shared)
    if traced_for() != "cpu":
        shapes = [jax.ShapeDtypeStruct((count, *o.shape[1:]), o.dtype) for o in outs]
        call = mosaic().row_call(spec.name, spec, rows, shared, shapes, block=schedule.gpu_rows)
        return tuple(call(*rows, *shared))

    def kernel(*refs):
        inputs, outputs = refs[: -len(outs)], refs[-len(outs) :]
        for ref, value in zip(outputs, spec(*(ref[...] for ref in inputs)), strict=True):
            ref[...] = value

    padded = round_up(count, _BLOCK)
    results = region_call(
        spec.name,
        kernel,
        out_shape=[jax.ShapeDtypeStruct((padded, *o.shape[1:]), o.dtype) for o in outs],
        grid=(padded // _BLOCK,),
        in_specs=[_row_spec(x) for x in blocks] + [_whole_spec(w) for w in shared],
        out_specs=[_row_spec(o) for o in outs],
    )(*(_pad_rows(x, padded) for x in rows), *shared)
    return tuple(out[:count] for out in results)


def _forward(spec: _Spec, schedule: Schedule, axis_name: AxisName | None, rows, shared, segments):
    return _row_op(spec, schedule, axis_name, rows, shared, segments), (rows, shared, segments)


def _backward(spec: _Spec, schedule: Schedule, axis_name: AxisName | None, residuals, cotangents):
    rows, shared, segments = residuals
    count, shared = rows[0].shape[0], spec.as_read(rows, shared)
    padded = round_up(count, CHUNK)
    args = (*rows, *shared)
    floats = [i for i, x in enumerate(args) if _is_float(x) and i not in spec.constants]
    row_floats = [i for i in floats if i < len(rows)]
    shared_floats = [i for i in floats if i >= len(rows)]
    cotangents = [g for g in cotangents if g.dtype != jax.dtypes.float0]
    blocks = padded // CHUNK

    def pull(values, grads):
        def of_floats(*inputs):
            full = list(values)
            for i, x in zip(floats, inputs, strict=True):
                full[i] = x
            return tuple(out for out in spec(*full) if _is_float(out))

        return jax.vjp(of_floats, *(values[i] for i in floats))[1](tuple(grads))

    def kernel(*refs):
        values = [ref[...] for ref in refs[: len(args)]]
        grads = [ref[...] for ref in refs[len(args) : len(args) + len(cotangents)]]
        for ref, grad in zip(refs[len(args) + len(cotangents) :], pull(values, grads), strict=True):
            ref[...] = grad.reshape(ref.shape)

    def row(*values):
        grads = values[len(rows) : len(rows) + len(cotangents)]
        return pull([*values[: len(rows)], *values[len(rows) + len(cotangents) :]], grads)

    on_cpu = traced_for() == "cpu"
    outs = [jax.ShapeDtypeStruct((padded if on_cpu else count, *args[i].shape[1:]), args[i].dtype) for i in row_floats]
    outs += [jax.ShapeDtypeStruct((blocks, *args[i].shape), args[i].dtype) for i in shared_floats]
    row_blocks = [jax.ShapeDtypeStruct((CHUNK, *x.shape[1:]), x.dtype) for x in (*rows, *cotangents)]
    row_specs = [_row_spec(x) for x in row_blocks]
    name = f"{spec.name}.backward"
    if on_cpu:
        results = region_call(
            name,
            kernel,
            out_shape=outs,
            grid=(blocks,),
            in_specs=row_specs[: len(rows)] + [_whole_spec(w) for w in shared] + row_specs[len(rows) :],
            out_specs=[row_specs[i] for i in row_floats]
            + [pl.BlockSpec((1, *args[i].shape), lambda i, n=args[i].ndim: (i,) + (0,) * n) for i in shared_floats],
        )(*(_pad_rows(x, padded) for x in rows), *shared, *(_pad_rows(g, padded) for g in cotangents))
    else:
        of_rows, num_sums = (*rows, *cotangents), len(shared_floats)
        if num_sums:
            # Runs of 8 rows, then the 8 runs of a block: a chain each, whatever the schedule.
            outs[-num_sums:] = [jax.ShapeDtypeStruct((8 * blocks, *o.shape[1:]), o.dtype) for o in outs[-num_sums:]]
        block = CHUNK // 8 if num_sums else schedule.gpu_rows
        call = mosaic().row_call(name, row, of_rows, shared, outs, block=block, num_sums=num_sums)
        results = list(call(*of_rows, *shared))
        for i, runs in enumerate(results[len(row_floats) :], len(row_floats)):
            runs = runs.reshape(blocks, 8, -1)
            out = jax.ShapeDtypeStruct((blocks, runs.shape[2]), runs.dtype)
            call = mosaic().row_call(f"{name}.runs", _add_runs, [runs], [], [out], block=1)
            results[i] = call(runs)[0].reshape(blocks, *outs[i].shape[1:])

    grads = [None if _is_float(x) else _no_gradient(x) for x in args]
    for i, grad in zip(floats, results, strict=True):
        grads[i] = grad[:count] if i < len(rows) else _sum_blocks(spec, name, grad, segments, axis_name)
    return tuple(grads[: len(rows)]), tuple(grads[len(rows) :]), None


_row_op.defvjp(_forward, _backward)


def _sum_blocks(spec: _Spec, name: str, partials: jax.Array, segments: Segments, axis_name: AxisName | None):
    """The gradient of something shared, from the partial of each block (of each head of it, if `per_head`)."""
    if not spec.per_head:
        return segment_sum(partials, segments, axis_name=axis_name)
    if axis_name is not None:
        partials = lax.all_gather(partials, axis_name, axis=1, tiled=True)
    return segment_sum(row_op(f"{name}.heads", head_sum)(partials), segments)


def head_sum(partials: Float[Array, "blocks heads width"]) -> Float[Array, "blocks width"]:
    """Adds the heads: a chain inside each of gcd(heads, 8) contiguous splits, a tree over the splits."""
    heads = partials.shape[1]
    chains = [
        trees.chain(jnp.add, [partials[:, head] for head in range(start, end)])
        for start, end in split_bounds(heads, math.gcd(heads, 8))
    ]
    return trees.fold(jnp.add, chains)


def _add_runs(runs: jax.Array) -> list[jax.Array]:
    return [trees.chain(jnp.add, [runs[:, i] for i in range(runs.shape[1])])]


def _row_spec(block) -> pl.BlockSpec:
    return pl.BlockSpec(block.shape, lambda i, n=len(block.shape): (i,) + (0,) * (n - 1))


def _whole_spec(array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda i, n=array.ndim: (0,) * n)


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, rows - x.shape[0], 0)] + [(0, 0, 0)] * (x.ndim - 1))


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _no_gradient(x: jax.Array):
    return jnp.zeros(x.shape, jax.dtypes.float0)
