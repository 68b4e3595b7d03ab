"""Sums and moves between the ranks of `jax.shard_map`, with the bits of one device.

Nothing is added on the wire: values move, and each rank adds them itself, by rank, in the tree of `isojax.trees.fold`
(docs/gradients.md, "Ranks"). `jax.grad` is taken inside `jax.shard_map(..., check_vma=False)`. There every value is of
one kind, and so is its cotangent:

- *replicated*: all ranks have the same bits. The cotangent is the whole one, on every rank the same bits.
- *sharded*: a rank has its piece. The cotangent is the whole one of that piece.
- *partial*: a rank has one term of a sum over ranks. The cotangent of a term is that of the sum.

A function below says which kind it takes and gives. What makes another kind of a value without a collective, such as a
product of replicated rows with a sharded weight, has a partial cotangent: only an op with `axis_name` adds it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PyTree

from pallas_kernels.cast import cast
from pallas_kernels.sharding import AxisName, axis_size, check_pieces
from pallas_kernels.tree_sum import tree_sum


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of an exchange, never its bits.

    Attributes:
        one_shot: Most elements that every rank gets from all; larger sums are added in pieces, then gathered.
    """

    one_shot: int = 1 << 21


def psum[T: PyTree](x: T, axis_name: AxisName, *, schedule: Schedule = Schedule()) -> T:
    """Adds a term of every rank: *partial* to *replicated*; `lax.psum` with one order.

    Terms are added in tree order by rank, in float32, and rounded once. Ranks that have added aligned runs of terms, a
    power of two each, in tree order and float32 get the bits of one device. Integers are added too. The
    cotangent of the sum, which is replicated, goes to every term as it is: nothing is added backward.

    That is the derivative inside `shard_map`. A gradient taken outside of it divides the cotangent by the number of
    ranks and adds with XLA's `psum`: gradients of sharded values are wrong, and `isojax.audit` names both operations.

    Args:
        x: An array or a tree of them; floats are bfloat16 or float32.
        axis_name: The mesh axis, or several.
        schedule: How terms travel.
    """
    return jax.tree.map(functools.partial(_add, axis_name, schedule), x)


def reduce_scatter(x: Float[Array, "*shape"], axis_name: AxisName, *, axis: int = 0) -> Float[Array, "*piece"]:
    """This rank's piece of the sum of every rank's `x`: *partial* to *sharded*; added as in `psum`.

    The cotangents of all pieces are gathered, and go to every term as they are.

    Args:
        x: One term, bfloat16 or float32.
        axis_name: The mesh axis, or several.
        axis: The axis of `x` that is cut into a piece for every rank.

    Raises:
        ShardingError: If ranks cannot cut that axis into equal pieces.
    """
    return _reduce_scatter(axis_name, axis % x.ndim, x)


def all_gather(x: Array, axis_name: AxisName, *, axis: int = 0) -> Array:
    """The pieces of all ranks, joined along `axis` in rank order: *sharded* to *replicated*.

    A rank gets its own piece of the cotangent, which must be replicated: whatever reads the result does the same on
    every rank. Where a product reads it with a piece of a weight, pass `gather_axis` to `ops.column_linear`
    instead, which adds the ranks' cotangents in float32. (`lax.all_gather` adds them by XLA's `reduce_scatter`,
    rounded to the dtype of `x` on every rank first.)

    Args:
        x: One piece.
        axis_name: The mesh axis, or several.
        axis: The axis along which pieces are joined.
    """
    axis %= x.ndim
    return _all_gather(axis_name, axis, x.shape[axis], x)


def from_owners(
    candidates: Float[Array, "rows width"], owners: Int32[Array, " rows"], axis_name: AxisName, *, scatter: bool
) -> Float[Array, "own_rows width"]:
    """Row by row what the rank has that owns the row; nothing is added, so that a −0 stays one.

    Each rank is sent the candidates of its rows, and chooses.

    Args:
        candidates: What this rank has for each row; only its own rows count.
        owners: The rank that owns each row, the same on every rank.
        axis_name: The mesh axis, or several.
        scatter: Whether a rank wants its rows alone, equally many on each; else all ranks get all rows.
    """
    ranks, (rows, width) = axis_size(axis_name), candidates.shape
    missing = -rows % ranks
    pieces = jnp.pad(candidates, ((0, missing), (0, 0))).reshape(ranks, -1, width)
    pieces = lax.all_to_all(pieces, axis_name, 0, 0, tiled=True)
    owner = jnp.pad(owners, (0, missing)).reshape(ranks, -1)[lax.axis_index(axis_name)]
    own = jnp.take_along_axis(pieces, owner[None, :, None], axis=0)[0]
    return own if scatter else lax.all_gather(own, axis_name, tiled=True)[:rows]


def add_terms(
    term: Float[Array, "*shape"], axis_name: AxisName, dtype: DTypeLike, schedule: Schedule = Schedule()
) -> Float[Array, "*shape"]:
    """The sum of every rank's `term`, rounded once to `dtype`, on every rank. For use inside an op's `custom_vjp`."""
    if term.size <= schedule.one_shot or axis_size(axis_name) == 1:
        return cast(tree_sum(lax.all_gather(term, axis_name)), dtype)
    flat = jnp.pad(term.reshape(-1), (0, -term.size % axis_size(axis_name)))
    piece = add_to_pieces(flat, axis_name, dtype)
    return lax.all_gather(piece, axis_name, tiled=True)[: term.size].reshape(term.shape)


def add_to_pieces(
    term: Float[Array, "*shape"], axis_name: AxisName, dtype: DTypeLike, axis: int = 0
) -> Float[Array, "*piece"]:
    """This rank's piece along `axis` of the sum of every rank's `term`. For use inside an op's `custom_vjp`."""
    check_pieces("reduce_scatter", term.shape[axis], "entries", axis_name)
    pieces = jnp.stack(jnp.split(term, axis_size(axis_name), axis))
    return cast(tree_sum(lax.all_to_all(pieces, axis_name, 0, 0, tiled=True)), dtype)


def _add(axis_name: AxisName, schedule: Schedule, x: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return _psum(axis_name, schedule, x) if is_float else lax.psum(x, axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _psum(axis_name, schedule, x):
    return add_terms(x, axis_name, x.dtype, schedule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reduce_scatter(axis_name, axis, x):
    return add_to_pieces(x, axis_name, x.dtype, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_gather(axis_name, axis, size, x):
    del size
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


_psum.defvjp(
    lambda axis_name, schedule, x: (_psum(axis_name, schedule, x), None),
    lambda axis_name, schedule, _, cotangent: (cotangent,),
)
_reduce_scatter.defvjp(
    lambda axis_name, axis, x: (_reduce_scatter(axis_name, axis, x), None),
    lambda axis_name, axis, _, cotangent: (lax.all_gather(cotangent, axis_name, axis=axis, tiled=True),),
)
_all_gather.defvjp(
    lambda axis_name, axis, size, x: (_all_gather(axis_name, axis, size, x), None),
    lambda axis_name, axis, size, _, cotangent: (
        lax.dynamic_slice_in_dim(cotangent, lax.axis_index(axis_name) * size, size, axis),
    ),
)
