"""Linear layers: column-parallel (all projections of one input) and row-parallel (a tree over splits of K)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.cast import cast
from pallas_kernels.linear import kernel
from pallas_kernels.linear.numerics import Numerics, Schedule, split_axis


def column_linear(
    x: Float[Array, "rows inputs"],
    weights: Sequence[Float[Array, "_ inputs"]],
    *,
    out_dtypes: Sequence[DTypeLike | None] | None = None,
    segments: Segments | None = None,
    numerics: Numerics = Numerics(),
    schedule: Schedule = Schedule(),
) -> tuple[Float[Array, "rows _"], ...]:
    """`x @ weight.T` for every projection of one input.

    An output element is one float32 chain over blocks of K, rounded once; it depends on its row of `x` and
    its row of the weight alone. All projections of an input are one op because their input gradients are one sum: for
    each of `gradient_splits` splits of the output axes a chain over projections and their blocks, then a tree. The
    gradient of a weight is float32: 64-row products in a chain for each sequence, a tree over sequences.

    Args:
        x: Rows in bfloat16 or float32.
        weights: Matrices `[outputs, inputs]`; rounded to the dtype of `x` if they have another.
        out_dtypes: Dtype of each output; None stands for the dtype of `x`.
        segments: The sequence of every 64 rows, for weight gradients; by default one sequence.
        numerics: What decides bits.
        schedule: How the work is cut into tiles.

    Returns:
        One array for each weight.

    Raises:
        ValueError: If a weight does not fit `x`.
    """
    _check("column_linear", x, weights)
    dtypes = tuple(jnp.dtype(dtype or x.dtype) for dtype in out_dtypes or [None] * len(weights))
    segments = segments or Segments.one(x.shape[0])
    return _column((dtypes, numerics, schedule), x, tuple(weights), segments)


def row_linear(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"],
    *,
    segments: Segments | None = None,
    numerics: Numerics = Numerics(),
    schedule: Schedule = Schedule(),
) -> Float[Array, "rows outputs"]:
    """`x @ weight.T` with K in `num_splits` contiguous splits: a chain inside each, a float32 tree over them.

    A shard that holds whole splits computes a subtree, so any tensor parallelism that divides `num_splits`
    gives the same bits. One rounding, at the root. Gradients as in `column_linear`, with one split.

    Args:
        x: Rows in bfloat16 or float32.
        weight: Matrix `[outputs, inputs]`; rounded to the dtype of `x` if it has another.
        segments: The sequence of every 64 rows, for the weight gradient; by default one sequence.
        numerics: What decides bits.
        schedule: How the work is cut into tiles.

    Raises:
        ValueError: If `weight` does not fit `x`, or `num_splits` does not divide the inputs.
    """
    _check("row_linear", x, (weight,))
    if x.shape[1] % numerics.num_splits:
        raise ValueError(
            f"row_linear cuts its {x.shape[1]} inputs into num_splits={numerics.num_splits} equal splits, which does"
            " not divide: choose a divisor in the contract, for both programs"
        )
    segments = segments or Segments.one(x.shape[0])
    return _row((numerics, schedule), x, weight, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _column(static, x, weights, segments):
    dtypes, _, schedule = static
    return tuple(
        _product("linear.column", x, cast(w, x.dtype), 1, dtype, schedule)
        for w, dtype in zip(weights, dtypes, strict=True)
    )


def _column_forward(static, x, weights, segments):
    return _column(static, x, weights, segments), (x, weights, segments)


def _column_backward(static, residuals, out_grads):
    _, numerics, schedule = static
    x, weights, segments = residuals
    # Products take operands of one dtype: float32 cotangents (of float32 logits) are rounded as the weights are.
    out_grads = [cast(g, x.dtype) for g in out_grads]
    grads, columns, blocks = [], [], []
    for grad, weight in zip(out_grads, weights, strict=True):
        pieces, block = split_axis(grad, numerics.gradient_splits)
        grads.append(pieces)
        columns.append(split_axis(cast(weight, x.dtype).T, numerics.gradient_splits)[0])
        blocks += [block] * (pieces.shape[-1] // block)
    x_grad = kernel.product(
        "linear.column.backward",
        jnp.concatenate(grads, axis=-1),
        jnp.concatenate(columns, axis=-1),
        blocks,
        x.dtype,
        schedule,
    )
    return x_grad, _weight_grads("linear.column", out_grads, x, weights, segments, schedule), _none(segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(static, x, weight, segments):
    numerics, schedule = static
    return _product("linear.row", x, cast(weight, x.dtype), numerics.num_splits, x.dtype, schedule)


def _row_forward(static, x, weight, segments):
    return _row(static, x, weight, segments), (x, weight, segments)


def _row_backward(static, residuals, out_grad):
    _, schedule = static
    x, weight, segments = residuals
    x_grad = _product("linear.row.backward", out_grad, cast(weight, x.dtype).T, 1, x.dtype, schedule)
    (weight_grad,) = _weight_grads("linear.row", [out_grad], x, [weight], segments, schedule)
    return x_grad, weight_grad, _none(segments)


_column.defvjp(_column_forward, _column_backward)
_row.defvjp(_row_forward, _row_backward)


def _product(name: str, x, weight, num_splits: int, dtype, schedule: Schedule):
    lhs, block = split_axis(x, num_splits)
    rhs, _ = split_axis(weight, num_splits)
    return kernel.product(name, lhs, rhs, [block] * (lhs.shape[-1] // block), dtype, schedule)


def _weight_grads(name: str, out_grads, x, weights, segments: Segments, schedule: Schedule):
    return tuple(
        cast(kernel.weight_gradient(f"{name}.weight_gradient", g, x, segments, schedule), w.dtype)
        for g, w in zip(out_grads, weights, strict=True)
    )


def _check(name: str, x, weights) -> None:
    for index, weight in enumerate(weights):
        if weight.ndim != 2 or weight.shape[1] != x.shape[1]:
            raise ValueError(
                f"{name} multiplies rows of {x.shape[1]} inputs, got weight {index} of shape {weight.shape}:"
                " pass it as [outputs, inputs]"
            )


def _none(segments: Segments):
    return jax.tree.map(lambda s: jnp.zeros(s.shape, jax.dtypes.float0), segments)
