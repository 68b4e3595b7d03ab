"""Sums of a loss: over parts in tree order, over the tokens of a batch."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from isojax.layouts import Segments
from pallas_kernels.cast import cast
from pallas_kernels.elementwise import elementwise
from pallas_kernels.segment_sum import segment_sum
from pallas_kernels.sharding import AxisName, check_subtrees, rows_of_all
from pallas_kernels.tree_sum import kernel
from pallas_kernels.tree_sum.kernel import Schedule

_DTYPES = ("bfloat16", "float32")


def tree_sum(
    parts: Float[Array, "parts *shape"], *, axis_name: AxisName | None = None, schedule: Schedule = Schedule()
) -> Float[Array, "*shape"]:
    """Sums `parts` over their leading axis in the order of `isojax.trees`.

    The order follows from the number of parts alone: no width, schedule or platform
    changes a bit of the sum, nor does summing aligned shards of float32 parts first.

    Args:
        parts: The terms in contract order, bfloat16 or float32.
        axis_name: The mesh axis that parts are sharded over, inside `shard_map`; every rank gets the sum over all. A
            rank holds a power of two of them, which is a subtree.
        schedule: How the work is cut into blocks.

    Returns:
        The sum in the dtype of `parts`: added in float32, rounded once. Its cotangent goes to every part as it is.

    Raises:
        ValueError: If `parts` has another dtype, there are none, or a rank holds a number of them that is no subtree.
    """
    if parts.dtype.name not in _DTYPES:
        raise ValueError(
            f"tree_sum adds {' or '.join(_DTYPES)}, got {parts.dtype.name}: cast the parts"
            " where they are made, so that the contract names that rounding"
        )
    if not parts.shape[0]:
        raise ValueError("tree_sum needs at least one part, got none: pass a zero for an empty sum")
    check_subtrees("tree_sum", parts.shape[0], axis_name)
    return _tree_sum(schedule, axis_name, parts.shape[0], parts)


def sum_tokens(
    values: Float32[Array, " rows"], segments: Segments | None = None, *, axis_name: AxisName | None = None
) -> Float32[Array, ""]:
    """Sums one value per row: a tree in 64 rows, a chain over the blocks of a sequence, a tree over sequences.

    The bits depend on the sequences alone: an aligned power-of-two run of sequences summed
    elsewhere is a subtree.

    Args:
        values: A term for every row; rows that are no token must be zero.
        segments: The sequence of every 64 rows of all ranks; by default one sequence.
        axis_name: The mesh axis that rows are sharded over, inside `shard_map`; every rank gets the sum over all.

    Returns:
        The sum. Its cotangent goes to every row as it is.

    Raises:
        ValueError: If `values` and `segments` disagree on the number of blocks, or ranks hold no whole blocks.
    """
    all_rows = rows_of_all("sum_tokens", values.shape[0], axis_name)
    return _sum_tokens(axis_name, values.shape[0], values, segments or Segments.one(all_rows))


def add_gradients(a: Float32[Array, "*shape"], b: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """`a + b`: two sums over sequences become one. In which order they meet is the caller's part of the contract."""
    return elementwise("add_gradients", lambda x, y: (x + y,), [a, b], out_dtypes=[a.dtype])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _tree_sum(schedule, axis_name, count, parts):
    flat = parts.reshape(count, -1)
    if axis_name is not None:
        # A rank's subtree is not rounded; the root is.
        flat = lax.all_gather(kernel.tree_sum(cast(flat, jnp.float32), schedule), axis_name)
    return cast(kernel.tree_sum(flat, schedule), parts.dtype).reshape(parts.shape[1:])


_tree_sum.defvjp(
    lambda schedule, axis_name, count, parts: (_tree_sum(schedule, axis_name, count, parts), None),
    lambda schedule, axis_name, count, _, cotangent: (jnp.broadcast_to(cotangent, (count, *cotangent.shape)),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_tokens(axis_name, rows, values, segments):
    return segment_sum(kernel.block_sums(values)[:, None], segments, axis_name=axis_name)[0]


_sum_tokens.defvjp(
    lambda axis_name, rows, values, segments: (_sum_tokens(axis_name, rows, values, segments), None),
    lambda axis_name, rows, _, cotangent: (jnp.broadcast_to(cotangent, (rows,)), None),
)
