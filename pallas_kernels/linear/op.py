"""Linear layers: column-parallel (all projections of one input) and row-parallel (a tree over splits of K)."""

import functools
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.cast import cast
from pallas_kernels.collectives import add_terms, add_to_pieces
from pallas_kernels.linear import kernel
from pallas_kernels.linear.numerics import Numerics, Schedule, split_axis
from pallas_kernels.region import traced_for
from pallas_kernels.sharding import AxisName, axis_size, check_pieces, rows_of_all, sharded_rows, splits_of_rank


def column_linear(
    x: Float[Array, "rows inputs"],
    weights: Sequence[Float[Array, "_ inputs"]],
    *,
    out_dtypes: Sequence[DTypeLike | None] | None = None,
    segments: Segments | None = None,
    axis_name: AxisName | None = None,
    gather_axis: Literal[0] | None = None,
    replicas: Sequence[AxisName | None] | None = None,
    rows_axis_name: AxisName | None = None,
    numerics: Numerics = Numerics(),
    schedule: Schedule = Schedule(),
) -> tuple[Float[Array, "all_rows _"], ...]:
    """`x @ weight.T` for every projection of one input.

    An output element is one float32 chain over blocks of K, rounded once; it depends on its row of `x` and
    its row of the weight alone. All projections of an input are one op because their input gradients are one sum: for
    each of `gradient_splits` splits of the output axes a chain over projections and their blocks, then a tree. The
    gradient of a weight is float32: 64-row products in a chain for each sequence, a tree over sequences.

    Inside `shard_map` with `axis_name` a rank has its run of the outputs of every weight, and the bits of one device.
    For the input gradient it adds the subtree of the splits it holds; the ranks' meet in float32, rounded once. With
    `rows_axis_name` it has its rows and all of every weight: the rows of all meet for the gradients of weights alone.

    Args:
        x: Rows in bfloat16 or float32: all of them, or with `gather_axis` those of this rank.
        weights: Matrices `[outputs, inputs]`; rounded to the dtype of `x` if they have another.
        out_dtypes: Dtype of each output; None stands for the dtype of `x`.
        segments: The sequence of every 64 rows of all ranks, for weight gradients; by default one sequence.
        axis_name: The mesh axis that outputs are sharded over.
        gather_axis: 0 if rows are sharded over the same axis: they are gathered first, and a rank gets the
            gradient of its own.
        replicas: For each weight the last of the axes of `axis_name` if its ranks have the same run of the outputs, as
            those of a KV head that several ranks read; their cotangents are the same whole one. None for none.
        rows_axis_name: The mesh axis that rows are sharded over, with whole weights on every rank (a router, a shared
            expert): each gets their gradients over all rows. Without `axis_name`.
        numerics: What decides bits.
        schedule: How the work is cut into tiles.

    Returns:
        One array for each weight, with all rows (of this rank, with `rows_axis_name`).

    Raises:
        ValueError: If a weight does not fit `x`, ranks do not hold whole splits of the outputs or whole blocks of rows,
            or both axes are given.
    """
    _check("column_linear", x, weights)
    if axis_name is not None and rows_axis_name is not None:
        raise ValueError(
            f"column_linear got axis_name={axis_name!r} and rows_axis_name={rows_axis_name!r}: weights are either"
            " sharded or whole; rows that are sharded too are gather_axis=0"
        )
    sharded = sharded_rows("column_linear", "gather_axis", gather_axis, axis_name)
    ranks = _Ranks(axis_name, sharded, tuple(replicas or [None] * len(weights)), rows_axis_name)
    splits_of_rank("column_linear", "gradient_splits", numerics.gradient_splits, axis_name)
    dtypes = tuple(jnp.dtype(dtype or x.dtype) for dtype in out_dtypes or [None] * len(weights))
    all_rows = (
        x.shape[0] * axis_size(axis_name) if sharded else rows_of_all("column_linear", x.shape[0], rows_axis_name)
    )
    segments = segments or Segments.one(all_rows)
    return _column((dtypes, numerics, schedule, ranks), x, tuple(weights), segments)


def row_linear(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"],
    *,
    segments: Segments | None = None,
    axis_name: AxisName | None = None,
    scatter_axis: Literal[0] | None = None,
    numerics: Numerics = Numerics(),
    schedule: Schedule = Schedule(),
) -> Float[Array, "own_rows outputs"]:
    """`x @ weight.T` with K in `num_splits` contiguous splits: a chain inside each, a float32 tree over them.

    A shard that holds whole splits computes a subtree, so any tensor parallelism that divides `num_splits`
    gives the same bits. One rounding, at the root. Gradients as in `column_linear`, with one split.

    Inside `shard_map` with `axis_name` a rank has its run of the inputs; the ranks' subtrees meet in float32.

    Args:
        x: Rows in bfloat16 or float32.
        weight: Matrix `[outputs, inputs]`; rounded to the dtype of `x` if it has another.
        segments: The sequence of every 64 rows, for the weight gradient; by default one sequence.
        axis_name: The mesh axis that inputs are sharded over.
        scatter_axis: 0 to leave every rank its rows of the result; by default all ranks get all rows.
        numerics: What decides bits.
        schedule: How the work is cut into tiles.

    Returns:
        All rows, or with `scatter_axis` those of this rank.

    Raises:
        ValueError: If `weight` does not fit `x`, `num_splits` does not divide the inputs, ranks do not hold whole
            splits of them, or do not divide the rows that are scattered.
    """
    _check("row_linear", x, (weight,))
    ranks = _Ranks(axis_name, sharded_rows("row_linear", "scatter_axis", scatter_axis, axis_name))
    if x.shape[1] % splits_of_rank("row_linear", "num_splits", numerics.num_splits, axis_name):
        raise ValueError(
            f"row_linear cuts its {x.shape[1] * axis_size(axis_name)} inputs into num_splits={numerics.num_splits}"
            " equal splits, which does not divide: choose a divisor in the contract, for both programs"
        )
    if ranks.rows:
        check_pieces("row_linear", x.shape[0], "rows", axis_name)
    segments = segments or Segments.one(x.shape[0])
    return _row((numerics, schedule, ranks), x, weight, segments)


class _Ranks(NamedTuple):
    """How a layer is spread over ranks."""

    axis_name: AxisName | None
    rows: bool  # Whether the side of the layer that is not sharded itself has its rows sharded.
    replicas: tuple[AxisName | None, ...] = (None,)  # Of each weight: over which of the axes it is the same.
    of_whole: AxisName | None = None  # The axis of rows whose ranks have whole weights.

    def all_rows(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.axis_name, tiled=True) if self.rows else x

    def tree_product(self, name: str, lhs, rhs, blocks: Sequence[int], dtype, schedule: Schedule) -> jax.Array:
        """A product whose splits lie on ranks: a subtree of each, then the tree over ranks, rounded once."""
        if self.axis_name is None:
            return kernel.product(name, lhs, rhs, blocks, dtype, schedule)
        add = add_to_pieces if self.rows else add_terms
        return add(kernel.product(name, lhs, rhs, blocks, jnp.dtype("float32"), schedule), self.axis_name, dtype)

    def splits(self, num_splits: int) -> int:
        return num_splits // axis_size(self.axis_name)

    def own_outputs(self, weight: int, x: jax.Array, axis: int) -> jax.Array:
        """Of the outputs of a weight those that this rank adds to the input gradient: replicas take a piece each."""
        if (axis_name := self.replicas[weight]) is None:
            return x
        check_pieces("column_linear", x.shape[axis], f"outputs of weight {weight}", axis_name)
        size = x.shape[axis] // axis_size(axis_name)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * size, size, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _column(static, x, weights, segments):
    dtypes, _, schedule, ranks = static
    x, outs = ranks.all_rows(x), {}
    rounded = _rounded(weights, x.dtype, 0)
    for group in _joined(dtypes):
        weight = _concatenated([rounded[i] for i in group], 0)
        out = kernel.product("linear.column", *_split(x, weight, 1), dtypes[group[0]], schedule)
        outs |= dict(zip(group, _cut(out, [weights[i].shape[0] for i in group], 1), strict=True))
    return tuple(outs[i] for i in range(len(weights)))


def _column_forward(static, x, weights, segments):
    return _column(static, x, weights, segments), (x, weights, segments)


def _column_backward(static, residuals, out_grads):
    _, numerics, schedule, ranks = static
    x, weights, segments = residuals
    num_splits = ranks.splits(numerics.gradient_splits)
    # Products take operands of one dtype: float32 cotangents (of float32 logits) are rounded as the weights are.
    out_grads = _rounded(out_grads, x.dtype, 1)
    grads, columns, blocks = [], [], []
    for i, (grad, weight) in enumerate(zip(out_grads, _rounded(weights, x.dtype, 0), strict=True)):
        pieces, block = split_axis(ranks.own_outputs(i, grad, 1), num_splits)
        grads.append(pieces)
        columns.append(split_axis(ranks.own_outputs(i, weight.T, 1), num_splits)[0])
        blocks += [block] * (pieces.shape[-1] // block)
    x_grad = ranks.tree_product(
        "linear.column.backward",
        jnp.concatenate(grads, axis=-1),
        jnp.concatenate(columns, axis=-1),
        blocks,
        x.dtype,
        schedule,
    )
    if ranks.of_whole is not None:
        weight_grads = _over_rows("linear.column", out_grads, x, weights, segments, schedule, ranks.of_whole)
    else:
        weight_grads = _weight_grads("linear.column", out_grads, ranks.all_rows(x), weights, segments, schedule)
    return x_grad, weight_grads, _none(segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(static, x, weight, segments):
    numerics, schedule, ranks = static
    operands = _split(x, cast(weight, x.dtype), ranks.splits(numerics.num_splits))
    return ranks.tree_product("linear.row", *operands, x.dtype, schedule)


def _row_forward(static, x, weight, segments):
    return _row(static, x, weight, segments), (x, weight, segments)


def _row_backward(static, residuals, out_grad):
    _, schedule, ranks = static
    x, weight, segments = residuals
    out_grad = ranks.all_rows(out_grad)
    operands = _split(out_grad, cast(weight, x.dtype).T, 1)
    x_grad = kernel.product("linear.row.backward", *operands, x.dtype, schedule)
    (weight_grad,) = _weight_grads("linear.row", [out_grad], x, [weight], segments, schedule)
    return x_grad, weight_grad, _none(segments)


_column.defvjp(_column_forward, _column_backward)
_row.defvjp(_row_forward, _row_backward)


def _split(x, weight, num_splits: int):
    """Both operands of a product in splits, and the blocks of a split."""
    lhs, block = split_axis(x, num_splits)
    rhs, _ = split_axis(weight, num_splits)
    return lhs, rhs, [block] * (lhs.shape[-1] // block)


def _weight_grads(name: str, out_grads, x, weights, segments: Segments, schedule: Schedule):
    grads = {}
    for group in _joined([w.dtype for w in weights]):
        joined = _concatenated([out_grads[i] for i in group], 1)
        grad = kernel.weight_gradient(f"{name}.weight_gradient", joined, x, segments, schedule)
        pieces = _cut(cast(grad, weights[group[0]].dtype), [weights[i].shape[0] for i in group], 0)
        grads |= dict(zip(group, pieces, strict=True))
    return tuple(grads[i] for i in range(len(weights)))


def _joined(kinds: Sequence[Hashable]) -> list[list[int]]:
    """Which projections are one product: schedule, as an output depends on its row of the weight alone.

    On the CPU all of one kind: a program then has fewer kernels to compile, most of its time. On a GPU each its own:
    joining them would copy the weights.
    """
    if traced_for() != "cpu":
        return [[i] for i in range(len(kinds))]
    return [[i for i, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)]


def _rounded(arrays: Sequence[jax.Array], dtype: jnp.dtype, axis: int) -> list[jax.Array]:
    """Each array in `dtype`; on the CPU what has to be cast and agrees but for `axis` is cast at once."""
    rounded = dict(enumerate(arrays))
    for group in _joined([x.dtype for x in arrays]):
        if arrays[group[0]].dtype != dtype:
            together = cast(_concatenated([arrays[i] for i in group], axis), dtype)
            rounded |= dict(zip(group, _cut(together, [arrays[i].shape[axis] for i in group], axis), strict=True))
    return [rounded[i] for i in range(len(arrays))]


def _concatenated(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    return jnp.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0]


def _cut(x: jax.Array, sizes: Sequence[int], axis: int) -> list[jax.Array]:
    return lax.split(x, sizes, axis) if len(sizes) > 1 else [x]


def _over_rows(name: str, out_grads, x, weights, segments: Segments, schedule: Schedule, axis_name: AxisName):
    """Gradients of whole weights over the rows of all ranks: each rank makes those of a run of outputs, for all."""
    grads, x = [], lax.all_gather(x, axis_name, tiled=True)
    for g, w in zip(out_grads, weights, strict=True):
        cut = w.shape[0] % axis_size(axis_name) == 0
        of_all = lax.all_to_all(g, axis_name, 1, 0, tiled=True) if cut else lax.all_gather(g, axis_name, tiled=True)
        (grad,) = _weight_grads(name, [of_all], x, [w], segments, schedule)
        grads.append(lax.all_gather(grad, axis_name, tiled=True) if cut else grad)
    return tuple(grads)


def _check(name: str, x, weights) -> None:
    for index, weight in enumerate(weights):
        if weight.ndim != 2 or weight.shape[1] != x.shape[1]:
            raise ValueError(
                f"{name} multiplies rows of {x.shape[1]} inputs, got weight {index} of shape {weight.shape}:"
                " pass it as [outputs, inputs]"
            )


def _none(segments: Segments):
    return jax.tree.map(lambda s: jnp.zeros(s.shape, jax.dtypes.float0), segments)
