"""The `jnp` body of a region in Mosaic GPU, equation by equation.

Mosaic GPU wants a register layout for every array and knows no axes of size 1. Both follow from the shape of a row
alone, so they are given here.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core

type Shaped = jax.Array | jax.ShapeDtypeStruct
type Layout = plgpu.Layout | Hashable  # With parameters; the class of those is not public.

_THREADS, _LANES, _WARPS, _VECTOR = 128, 32, 4, 8


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
class Part:
    """A piece of an input that is loaded where it is needed, and converted then."""

    ref: Any
    starts: tuple[jax.Array | int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, ref: Any, array: Shaped, row: jax.Array | None = None) -> "Part":
        """All of an input, or one of its rows."""
        starts, sizes = [0] * array.ndim, list(array.shape)
        if row is not None:
            starts[0], sizes[0] = row, 1
        return cls(ref, tuple(starts), tuple(sizes), (array.dtype,))

    def cut(self, axis: int, start: int, size: int) -> "Part":
        """A piece along an axis of the squeezed shape."""
        axis = [a for a, n in enumerate(self.sizes) if n != 1][axis]
        starts, sizes = list(self.starts), list(self.sizes)
        starts[axis], sizes[axis] = starts[axis] + start, size
        return dataclasses.replace(self, starts=tuple(starts), sizes=tuple(sizes))

    def load(self, where: Layout | None = None) -> jax.Array:
        shape = squeezed(self.sizes)
        piece = self.ref.at[*(s if n == 1 else pl.ds(s, n) for s, n in zip(self.starts, self.sizes, strict=True))]
        value = plgpu.load(piece, layout=(where or layout(shape)), optimized=False) if shape else piece[...]
        for dtype in self.dtypes:
            value = value != 0 if dtype == jnp.bool_ else value.astype(dtype)
        return value


type _Value = Part | jax.Array | np.ndarray


def evaluate(jaxpr: core.Jaxpr, consts: Sequence[np.ndarray], args: Sequence[_Value]) -> list[_Value]:
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
        args.append(loaded(_broadcast(value, axes, squeezed(out))))
    return primitive.bind(*args) if primitive else eqn.primitive.bind(*args, **_params(eqn))


def _call(eqn, *values: _Value):
    inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
    inner, consts = (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())
    return evaluate(inner, consts, values)


def _convert(eqn, value: _Value):
    dtype = eqn.params["new_dtype"]
    if isinstance(value, Part):
        return dataclasses.replace(value, dtypes=(*value.dtypes, dtype))
    return value.astype(dtype)


def _broadcast_in_dim(eqn, value: _Value, *_):
    shape, dimensions = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    kept = [a for a, n in enumerate(shape) if n != 1]
    return _broadcast(
        value,
        [kept.index(d) for d, n in zip(dimensions, eqn.invars[0].aval.shape, strict=True) if n != 1],
        squeezed(shape),
    )


def _same_order(eqn, value: _Value, *_):
    """A reshape that adds or drops axes of size 1."""
    (before,), (after,) = ([squeezed(v.aval.shape) for v in vs] for vs in (eqn.invars[:1], eqn.outvars))
    if before != after:
        raise ValueError(f"a row function on a GPU keeps its axes, got a reshape of {before} to {after}: slice instead")
    return value


def _reduce(eqn, value: _Value):
    kept = [a for a, n in enumerate(eqn.invars[0].aval.shape) if n != 1]
    value = loaded(value)
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
    if isinstance(value, Part):
        for axis, (start, size) in reversed(list(enumerate(cuts))):
            value = value.cut(axis, start, size)
        return value

    def through(memory):
        memory[...] = value
        piece = memory.at[*(start if size == 1 else pl.ds(start, size) for start, size in cuts)]
        shape = squeezed([size for _, size in cuts])
        return plgpu.load(piece, layout=layout(shape), optimized=False) if shape else piece[...]

    return pl.run_scoped(through, plgpu.SMEM(value.shape, value.dtype))


def _concatenate(eqn, *values: _Value):
    """Pieces meet in shared memory: in registers they lie in other lanes."""
    out = eqn.outvars[0].aval
    shape, pieces = squeezed(out.shape), [loaded(v) for v in values]
    axis = sum(n != 1 for n in out.shape[: eqn.params["dimension"]])

    def through(memory):
        start = 0
        for atom, value in zip(eqn.invars, pieces, strict=True):
            size = atom.aval.shape[eqn.params["dimension"]]
            at = (slice(None),) * axis + (start if size == 1 else pl.ds(start, size),)
            memory[at] = placed(value)
            start += size
        return plgpu.load(memory, layout=layout(shape), optimized=False)

    return pl.run_scoped(through, plgpu.SMEM(shape, out.dtype))


def _pad(eqn, value: _Value, filler: _Value):
    """Zeros (or another filler) beside the value, in shared memory."""
    out = eqn.outvars[0].aval
    shape, value = squeezed(out.shape), loaded(value)
    kept = [a for a, n in enumerate(out.shape) if n != 1]
    if any(eqn.params["padding_config"][a][2] for a in kept):
        raise ValueError("a row function on a GPU pads at the edges alone, not between elements")
    starts = [eqn.params["padding_config"][a][0] for a in kept]
    sizes = [eqn.invars[0].aval.shape[a] for a in kept]

    def through(memory):
        memory[...] = placed(_broadcast(filler, (), shape))
        memory[*(s if n == 1 else pl.ds(s, n) for s, n in zip(starts, sizes, strict=True))] = placed(value)
        return plgpu.load(memory, layout=layout(shape), optimized=False)

    return pl.run_scoped(through, plgpu.SMEM(shape, out.dtype))


def _iota(eqn):
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]
    if shape[dimension] == 1:
        return _broadcast(np.zeros((), eqn.params["dtype"]), (), squeezed(shape))
    dimension = sum(n != 1 for n in shape[:dimension])
    return plgpu.layout_cast(
        lax.broadcasted_iota(eqn.params["dtype"], squeezed(shape), dimension), layout(squeezed(shape))
    )


def _barrier(eqn, *values: _Value):
    return eqn.primitive.bind(*map(loaded, values))


def _integer_pow(eqn, value: _Value):
    power, value = eqn.params["y"], loaded(value)
    return lax.integer_pow(value, power) if power >= 0 else 1.0 / lax.integer_pow(value, -power)


def _log1p(eqn, value: _Value):
    """log(1 + x) by Kahan's quotient: Mosaic GPU has no log1p."""
    value = loaded(value)
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


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def loaded(value: _Value) -> jax.Array | np.ndarray:
    return value.load() if isinstance(value, Part) else value


def _broadcast(value: _Value, axes: Sequence[int], shape: tuple[int, ...]) -> _Value:
    """`value`, whose axes are `axes` of `shape`, over all of `shape`."""
    if len(axes) == len(shape):
        return value
    if not axes:
        return lax.broadcast_in_dim(loaded(value), shape, ())  # One register, which fits any layout.
    target = layout(shape)
    if isinstance(value, Part):
        value = value.load(cast(Any, target).reduce(tuple(a for a in range(len(shape)) if a not in axes)))
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, tuple(axes)), target)


def placed(value: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    return plgpu.layout_cast(value, layout(value.shape)) if value.shape else value
