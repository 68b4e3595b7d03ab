"""Sums of a loss: over parts in tree order, over the tokens of a batch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from isojax.layouts import Segments
from pallas_kernels.elementwise import elementwise
from pallas_kernels.segment_sum import segment_sum
from pallas_kernels.tree_sum import kernel
from pallas_kernels.tree_sum.kernel import Schedule

_DTYPES = ("bfloat16", "float32")


def tree_sum(parts: Float[Array, "parts *shape"], *, schedule: Schedule = Schedule()) -> Float[Array, "*shape"]:
    """Sums `parts` over their leading axis in the order of `isojax.trees`.

    The order follows from the number of parts alone: no width, schedule or platform
    changes a bit of the sum, nor does summing aligned shards of float32 parts first.

    Args:
        parts: The terms in contract order, bfloat16 or float32.
        schedule: How the work is cut into blocks.

    Returns:
        The sum in the dtype of `parts`: added in float32, rounded once. Its cotangent goes to every part as it is.

    Raises:
        ValueError: If `parts` has another dtype, or there are none.
    """
    if parts.dtype.name not in _DTYPES:
        raise ValueError(
            f"tree_sum adds {' or '.join(_DTYPES)}, got {parts.dtype.name}: cast the parts"
            " where they are made, so that the contract names that rounding"
        )
    if not parts.shape[0]:
        raise ValueError("tree_sum needs at least one part, got none: pass a zero for an empty sum")
    return _tree_sum(schedule, parts.shape[0], parts)


def sum_tokens(values: Float32[Array, " rows"], segments: Segments | None = None) -> Float32[Array, ""]:
    """Sums one value per row: a tree in 64 rows, a chain over the blocks of a sequence, a tree over sequences.

    The bits depend on the sequences alone: an aligned power-of-two run of sequences summed
    elsewhere is a subtree.

    Args:
        values: A term for every row; rows that are no token must be zero.
        segments: The sequence of every 64 rows; by default one sequence.

    Returns:
        The sum. Its cotangent goes to every row as it is.

    Raises:
        ValueError: If `values` and `segments` disagree on the number of blocks.
    """
    return _sum_tokens(values.shape[0], values, segments or Segments.one(values.shape[0]))


def add_gradients(a: Float32[Array, "*shape"], b: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """`a + b`: two sums over sequences become one. In which order they meet is the caller's part of the contract."""
    return elementwise("add_gradients", lambda x, y: (x + y,), [a, b], out_dtypes=[a.dtype])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tree_sum(schedule, count, parts):
    return kernel.tree_sum(parts.reshape(count, -1), schedule).reshape(parts.shape[1:])


_tree_sum.defvjp(
    lambda schedule, count, parts: (_tree_sum(schedule, count, parts), None),
    lambda schedule, count, _, cotangent: (jnp.broadcast_to(cotangent, (count, *cotangent.shape)),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_tokens(rows, values, segments):
    return segment_sum(kernel.block_sums(values)[:, None], segments)[0]


_sum_tokens.defvjp(
    lambda rows, values, segments: (_sum_tokens(rows, values, segments), None),
    lambda rows, _, cotangent: (jnp.broadcast_to(cotangent, (rows,)), None),
)
