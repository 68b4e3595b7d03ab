"""Row-wise ops: a function of one row, run over blocks of rows, with its gradient.

Most regions of a language model are row-wise: norms, gates, rotations, casts, residual adds.
Their definition is a plain `jnp` function over a block of rows; `row_op` turns it into a
region whose bits do not depend on how many rows there are, and derives the backward region.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from isojax.layouts import CHUNK, Segments, round_up
from pallas_kernels.region import region_call
from pallas_kernels.segment_sum import segment_sum

_BLOCK = CHUNK  # Rows of a block decide bits on the CPU (blocks of 8 and 64 rows differ): one block for every case.


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What of a row op is known when it is traced."""

    name: str
    fn: Callable[..., Any]  # (*rows, *shared) -> rows or a tuple of rows
    num_shared: int

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        out = self.fn(*args)
        return out if isinstance(out, tuple) else (out,)


def row_op(name: str, fn: Callable[..., Any], *, num_shared: int = 0) -> Callable[..., Any]:
    """Makes a row-wise region of `fn`.

    Args:
        name: The region's name; its backward is called `{name}.backward`.
        fn: Takes blocks `[rows, ...]` and then `num_shared` arrays that all rows share, and
            returns one block `[rows, ...]` or a tuple of them. Row r of the result depends on
            row r of the blocks alone. Integer and boolean blocks are allowed and get no gradient.
        num_shared: Number of trailing arguments shared by all rows (weights). Their gradient is
            a sum over rows: one partial in each 64-row block, then the order of `segment_sum`.

    Returns:
        `op(*rows, *shared, segments=None)` over any number of rows.
    """
    spec = _Spec(name, fn, num_shared)

    def op(*args: jax.Array, segments: Segments | None = None):
        rows = args[: len(args) - num_shared]
        shared = args[len(args) - num_shared :]
        if num_shared and segments is None:
            segments = Segments.one(rows[0].shape[0])
        out = _row_op(spec, rows, shared, segments if num_shared else None)
        return out if len(out) > 1 else out[0]

    return functools.wraps(fn)(op)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_op(spec: _Spec, rows, shared, segments):
    del segments
    count = rows[0].shape[0]
    blocks = [jax.ShapeDtypeStruct((_BLOCK, *x.shape[1:]), x.dtype) for x in rows]
    outs = jax.eval_shape(spec, *blocks, *shared)

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


def _forward(spec: _Spec, rows, shared, segments):
    return _row_op(spec, rows, shared, segments), (rows, shared, segments)


def _backward(spec: _Spec, residuals, cotangents):
    rows, shared, segments = residuals
    count = rows[0].shape[0]
    padded = round_up(count, CHUNK)
    floats = [i for i, x in enumerate(rows) if jnp.issubdtype(x.dtype, jnp.floating)]
    num_outputs = len(cotangents)
    blocks = padded // CHUNK

    def kernel(*refs):
        inputs = [ref[...] for ref in refs[: len(rows) + len(shared) + num_outputs]]
        values, grads = inputs[: len(rows)], tuple(inputs[len(rows) + len(shared) :])
        weights = inputs[len(rows) : len(rows) + len(shared)]

        def of_floats(float_rows, weights):
            full = list(values)
            for i, x in zip(floats, float_rows, strict=True):
                full[i] = x
            return spec(*full, *weights)

        _, pull = jax.vjp(of_floats, [values[i] for i in floats], weights)
        row_grads, weight_grads = pull(grads)
        outputs = refs[len(inputs) :]
        for ref, grad in zip(outputs, [*row_grads, *weight_grads], strict=True):
            ref[...] = grad.reshape(ref.shape)

    row_blocks = [jax.ShapeDtypeStruct((CHUNK, *x.shape[1:]), x.dtype) for x in (*rows, *cotangents)]
    row_specs = [_row_spec(x) for x in row_blocks]
    results = region_call(
        f"{spec.name}.backward",
        kernel,
        out_shape=[jax.ShapeDtypeStruct((padded, *rows[i].shape[1:]), rows[i].dtype) for i in floats]
        + [jax.ShapeDtypeStruct((blocks, *w.shape), w.dtype) for w in shared],
        grid=(blocks,),
        in_specs=row_specs[: len(rows)] + [_whole_spec(w) for w in shared] + row_specs[len(rows) :],
        out_specs=[row_specs[i] for i in floats]
        + [pl.BlockSpec((1, *w.shape), lambda i, n=w.ndim: (i,) + (0,) * n) for w in shared],
    )(*(_pad_rows(x, padded) for x in rows), *shared, *(_pad_rows(g, padded) for g in cotangents))

    row_grads = [_no_gradient(x) for x in rows]
    for i, grad in zip(floats, results, strict=False):
        row_grads[i] = grad[:count]
    weight_grads = tuple(segment_sum(p, segments) for p in results[len(floats) :])
    return tuple(row_grads), weight_grads, jax.tree.map(_no_gradient, segments)


_row_op.defvjp(_forward, _backward)


def _row_spec(block) -> pl.BlockSpec:
    return pl.BlockSpec(block.shape, lambda i, n=len(block.shape): (i,) + (0,) * (n - 1))


def _whole_spec(array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda i, n=array.ndim: (0,) * n)


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, rows - x.shape[0], 0)] + [(0, 0, 0)] * (x.ndim - 1))


def _no_gradient(x: jax.Array):
    return jnp.zeros(x.shape, jax.dtypes.float0)
