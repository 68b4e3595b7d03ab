"""Row functions on Hopper: the `jnp` body of a region, equation by equation, one row a warpgroup at a time.

Mosaic GPU wants a register layout for every array and knows no axes of size 1. Both follow from the shape of a row
alone, so they are given here, and the bits of a row cannot depend on how many rows there are or who computes them.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core

from isojax import trees

type Shaped = jax.Array | jax.ShapeDtypeStruct
type Layout = plgpu.Layout | Hashable  # With parameters; the class of those is not public.

_THREADS, _LANES, _WARPS, _VECTOR = 128, 32, 4, 8


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
            parts = [_Part.of(ref, x, at) for ref, x in zip(ins, rows, strict=False)]
            parts += [_Part.of(ref, x) for ref, x in zip(ins[len(rows) :], shared, strict=True)]
            values = [_loaded(v) for v in _evaluate(program.jaxpr, program.consts, parts)]
            for ref, out, value in zip(results, outs, values[:num_rows], strict=False):
                _store(ref, out.shape, at, value)
            return tuple(_placed(s + v) for s, v in zip(sums, values[num_rows:], strict=True))

        sums = outs[num_rows:]
        zeros = tuple(_placed(jnp.zeros(_squeezed(s.shape[1:]), s.dtype)) for s in sums)
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

        zeros = (_placed(jnp.zeros(block, jnp.float32)),) * count
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


def layout(shape: tuple[int, ...]) -> Layout:
    """Where a row lives. One axis: all threads, in vectors. Two: a head in one warp, heads over warps."""
    width = shape[-1]
    if len(shape) == 1 and width % _THREADS == 0:
        vector = math.gcd(width // _THREADS, _VECTOR)
        tiling = plgpu.Tiling(((_THREADS * vector,), (_LANES * vector,), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    lanes = math.gcd(width, _LANES)
    vector = math.gcd(width // lanes, _VECTOR)
    spare = () if lanes == _LANES else (plgpu.Replicated(_LANES // lanes),)
    warps = math.gcd(shape[0], _WARPS) if len(shape) > 1 else 1
    idle = () if warps == _WARPS else (plgpu.Replicated(_WARPS // warps),)
    if len(shape) == 1:
        tiling = plgpu.Tiling(((lanes * vector,), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=idle, lane_dims=(*spare, -2), vector_dim=-1)
    tiling = plgpu.Tiling(((warps, lanes * vector), (vector,)))
    of_warps = idle if warps == 1 else (*idle, -3)
    return plgpu.Layout.TILED(tiling, warp_dims=of_warps, lane_dims=(*spare, -2), vector_dim=-1)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A piece of an input that is loaded where it is needed, and converted then."""

    ref: Any
    starts: tuple[jax.Array | int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, ref: Any, array: Shaped, row: jax.Array | None = None) -> "_Part":
        """All of an input, or one of its rows."""
        starts, sizes = [0] * array.ndim, list(array.shape)
        if row is not None:
            starts[0], sizes[0] = row, 1
        return cls(ref, tuple(starts), tuple(sizes), (array.dtype,))

    def cut(self, axis: int, start: int, size: int) -> "_Part":
        """A piece along an axis of the squeezed shape."""
        axis = [a for a, n in enumerate(self.sizes) if n != 1][axis]
        starts, sizes = list(self.starts), list(self.sizes)
        starts[axis], sizes[axis] = starts[axis] + start, size
        return dataclasses.replace(self, starts=tuple(starts), sizes=tuple(sizes))

    def load(self, where: Layout | None = None) -> jax.Array:
        shape = _squeezed(self.sizes)
        piece = self.ref.at[*(s if n == 1 else pl.ds(s, n) for s, n in zip(self.starts, self.sizes, strict=True))]
        value = plgpu.load(piece, layout=(where or layout(shape)), optimized=False) if shape else piece[...]
        for dtype in self.dtypes:
            value = value != 0 if dtype == jnp.bool_ else value.astype(dtype)
        return value


type _Value = _Part | jax.Array | np.ndarray


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[np.ndarray], args: Sequence[_Value]) -> list[_Value]:
    """The results of a jaxpr, of whose arrays every axis of size 1 is dropped."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return np.asarray(atom.val, cast(Any, atom.aval).dtype) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        rule = _RULES.get(eqn.primitive.name, _elementwise)
        results = rule(eqn, *map(read, eqn.invars))
        env.update(zip(eqn.outvars, results if isinstance(results, list | tuple) else [results], strict=True))
    return [read(v) for v in jaxpr.outvars]


def _elementwise(eqn, *values: _Value, primitive=None):
    out = eqn.outvars[0].aval.shape
    kept = [a for a, n in enumerate(out) if n != 1]
    args = []
    for atom, value in zip(eqn.invars, values, strict=True):
        axes = [kept.index(a) for a, n in enumerate(atom.aval.shape) if n != 1]
        args.append(_loaded(_broadcast(value, axes, _squeezed(out))))
    return primitive.bind(*args) if primitive else eqn.primitive.bind(*args, **_params(eqn))


def _call(eqn, *values: _Value):
    inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
    inner, consts = (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())
    return _evaluate(inner, consts, values)


def _convert(eqn, value: _Value):
    dtype = eqn.params["new_dtype"]
    if isinstance(value, _Part):
        return dataclasses.replace(value, dtypes=(*value.dtypes, dtype))
    return value.astype(dtype)


def _broadcast_in_dim(eqn, value: _Value, *_):
    shape, dimensions = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    kept = [a for a, n in enumerate(shape) if n != 1]
    return _broadcast(
        value,
        [kept.index(d) for d, n in zip(dimensions, eqn.invars[0].aval.shape, strict=True) if n != 1],
        _squeezed(shape),
    )


def _same_order(eqn, value: _Value, *_):
    """A reshape that adds or drops axes of size 1."""
    (before,), (after,) = ([_squeezed(v.aval.shape) for v in vs] for vs in (eqn.invars[:1], eqn.outvars))
    if before != after:
        raise ValueError(f"a row function on a GPU keeps its axes, got a reshape of {before} to {after}: slice instead")
    return value


def _reduce(eqn, value: _Value):
    kept = [a for a, n in enumerate(eqn.invars[0].aval.shape) if n != 1]
    value = _loaded(value)
    for axis in sorted((kept.index(a) for a in eqn.params["axes"] if a in kept), reverse=True):
        value = eqn.primitive.bind(value, **_params(eqn, axes=(axis,)))
    return value


def _slice(eqn, value: _Value):
    if eqn.params["strides"] and set(eqn.params["strides"]) != {1}:
        raise ValueError("a row function on a GPU has no strided slices: let lanes meet in spread.sum_axis")
    shape = eqn.invars[0].aval.shape
    axes = [a for a, n in enumerate(shape) if n != 1]
    return _cut(value, [(eqn.params["start_indices"][a], eqn.outvars[0].aval.shape[a]) for a in axes])


def _split(eqn, value: _Value):
    shape, pieces, start = eqn.invars[0].aval.shape, [], 0
    for size in eqn.params.get("sizes", (1,) * shape[eqn.params["axis"]]):
        cuts = [(start, size) if a == eqn.params["axis"] else (0, n) for a, n in enumerate(shape) if n != 1]
        pieces.append(_cut(value, cuts))
        start += size
    return pieces


def _cut(value: _Value, cuts: Sequence[tuple[int, int]]) -> _Value:
    if isinstance(value, _Part):
        for axis, (start, size) in reversed(list(enumerate(cuts))):
            value = value.cut(axis, start, size)
        return value

    def through(memory):
        memory[...] = value
        piece = memory.at[*(start if size == 1 else pl.ds(start, size) for start, size in cuts)]
        shape = _squeezed([size for _, size in cuts])
        return plgpu.load(piece, layout=layout(shape), optimized=False) if shape else piece[...]

    return pl.run_scoped(through, plgpu.SMEM(value.shape, value.dtype))


def _concatenate(eqn, *values: _Value):
    """Pieces meet in shared memory: in registers they lie in other lanes."""
    out = eqn.outvars[0].aval
    shape, pieces = _squeezed(out.shape), [_loaded(v) for v in values]
    axis = sum(n != 1 for n in out.shape[: eqn.params["dimension"]])

    def through(memory):
        start = 0
        for atom, value in zip(eqn.invars, pieces, strict=True):
            size = atom.aval.shape[eqn.params["dimension"]]
            at = (slice(None),) * axis + (start if size == 1 else pl.ds(start, size),)
            memory[at] = _placed(value)
            start += size
        return plgpu.load(memory, layout=layout(shape), optimized=False)

    return pl.run_scoped(through, plgpu.SMEM(shape, out.dtype))


def _pad(eqn, value: _Value, filler: _Value):
    """Zeros (or another filler) beside the value, in shared memory."""
    out = eqn.outvars[0].aval
    shape, value = _squeezed(out.shape), _loaded(value)
    kept = [a for a, n in enumerate(out.shape) if n != 1]
    if any(eqn.params["padding_config"][a][2] for a in kept):
        raise ValueError("a row function on a GPU pads at the edges alone, not between elements")
    starts = [eqn.params["padding_config"][a][0] for a in kept]
    sizes = [eqn.invars[0].aval.shape[a] for a in kept]

    def through(memory):
        memory[...] = _placed(_broadcast(filler, (), shape))
        memory[*(s if n == 1 else pl.ds(s, n) for s, n in zip(starts, sizes, strict=True))] = _placed(value)
        return plgpu.load(memory, layout=layout(shape), optimized=False)

    return pl.run_scoped(through, plgpu.SMEM(shape, out.dtype))


def _iota(eqn):
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]
    if shape[dimension] == 1:
        return _broadcast(np.zeros((), eqn.params["dtype"]), (), _squeezed(shape))
    dimension = sum(n != 1 for n in shape[:dimension])
    return plgpu.layout_cast(
        lax.broadcasted_iota(eqn.params["dtype"], _squeezed(shape), dimension), layout(_squeezed(shape))
    )


def _barrier(eqn, *values: _Value):
    return eqn.primitive.bind(*map(_loaded, values))


def _integer_pow(eqn, value: _Value):
    power, value = eqn.params["y"], _loaded(value)
    return lax.integer_pow(value, power) if power >= 0 else 1.0 / lax.integer_pow(value, -power)


def _log1p(eqn, value: _Value):
    """log(1 + x) by Kahan's quotient: Mosaic GPU has no log1p."""
    value = _loaded(value)
    total = 1.0 + value
    return jnp.where(total == 1.0, value, jnp.log(total) * (value / jnp.where(total == 1.0, 1.0, total - 1.0)))


_RULES = {
    **dict.fromkeys(("jit", "custom_jvp_call", "custom_vjp_call", "closed_call", "checkpoint"), _call),
    **dict.fromkeys(("reshape", "squeeze"), _same_order),
    **dict.fromkeys(("stop_gradient", "reshard", "copy"), lambda eqn, value: value),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduce),
    "add_any": lambda eqn, *values: _elementwise(eqn, *values, primitive=lax.add_p),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "integer_pow": _integer_pow,
    "iota": _iota,
    "log1p": _log1p,
    "optimization_barrier": _barrier,
    "pad": _pad,
    "slice": _slice,
    **dict.fromkeys(("split", "unstack"), _split),
}


def _params(eqn, **changes):
    """Parameters of an equation; shardings, which a kernel has not, speak of other axes."""
    return {**eqn.params, **{k: None for k in ("sharding", "out_sharding") if k in eqn.params}, **changes}


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _loaded(value: _Value) -> jax.Array | np.ndarray:
    return value.load() if isinstance(value, _Part) else value


def _broadcast(value: _Value, axes: Sequence[int], shape: tuple[int, ...]) -> _Value:
    """`value`, whose axes are `axes` of `shape`, over all of `shape`."""
    if len(axes) == len(shape):
        return value
    if not axes:
        return lax.broadcast_in_dim(_loaded(value), shape, ())  # One register, which fits any layout.
    target = layout(shape)
    if isinstance(value, _Part):
        value = value.load(cast(Any, target).reduce(tuple(a for a in range(len(shape)) if a not in axes)))
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, tuple(axes)), target)


def _placed(value: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    return plgpu.layout_cast(value, layout(value.shape)) if value.shape else value


def _store(ref, shape: tuple[int, ...], row: jax.Array, value: jax.Array | np.ndarray) -> None:
    ref[row, *(0 if n == 1 else slice(None) for n in shape[1:])] = _placed(value)
