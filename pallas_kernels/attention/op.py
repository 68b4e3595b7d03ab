"""Causal attention over paged KV: whole chunks with their gradient, and one row at a time with the same bits."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from isojax.layouts import CHUNK
from pallas_kernels.attention import backward, kernel
from pallas_kernels.attention.numerics import Numerics, Schedule
from pallas_kernels.attention.pool import KV
from pallas_kernels.sharding import AxisName, check_subtrees
from pallas_kernels.step import Chunks, Decode

_DTYPES = {"bfloat16": "uint16", "float32": "uint32"}  # Compute dtype and how an integer pool stores it.


def attention_chunks(
    q: Float[Array, "blocks 64 heads width"],
    kv: KV,
    kv_pages: Int32[Array, "sequences pages_per_sequence"],
    chunks: Chunks,
    *,
    scale: float | None = None,
    axis_name: AxisName | None = None,
    numerics: Numerics = Numerics(),
    schedule: Schedule = Schedule(),
) -> Float[Array, "blocks 64 heads width"]:
    """Attends from every row of `chunks` to the tokens of its sequence up to its own.

    Query head h reads KV head h // (heads // kv_heads). Scores are float32 per KV block, scaled after
    their sum. The online softmax is a chain over the KV blocks of a split and then over the splits, ascending;
    exponentials are summed in float32 and rounded to the compute dtype as operands of their product with V;
    the output is divided by their sum and rounded once.

    A row's bits depend on its query, the tokens up to its position, scale, `numerics` and the dtypes
    alone: not on other rows, sequences or padding, on the page length or table, on where a piece begins or
    ends, nor on `schedule`. Only pages up to a block's own chunk are read, and only live tokens of them count,
    so that dead pages and rows may hold anything. Live K and V must be finite.

    The gradient keeps the same promise. dQ is a float32 chain over the 64-token blocks of KV, ascending. dK
    and dV are a float32 chain over the query blocks in every query head, ascending, and then a tree
    (`trees.fold`) over the query heads of the group. Scores are computed again from q, kv and their log-sum-exp.
    Each is rounded once. A page that two sequences own gets a NaN gradient, because no order is defined
    there; pages and rows that no row reads get zero.

    Ranks with KV heads of their own exchange nothing and need no `axis_name`. With more ranks than KV heads some have
    the same KV head and other query heads of it: their axis is `axis_name`, and on all of them dK and dV are whole.

    Args:
        q: Query rows after norm and rotation, bfloat16 or float32 (the compute dtype).
        kv: The pool of pages, K and then V, in the dtype of `q`, or its bits as unsigned integers;
            the tokens of this step are already written. `page_tokens` is a multiple of 64.
        kv_pages: Pages of every sequence, ascending. Entries past the last live token may be any page.
        chunks: Where the rows stand.
        scale: Of the scores; width**-0.5 by default.
        axis_name: The mesh axis that the query heads of each KV head are sharded over, inside `shard_map`.
        numerics: Blocks and splits of the softmax.
        schedule: How the work is cut into programs.

    Returns:
        Output rows in the dtype of `q`; rows that are not there are exactly zero.

    Raises:
        ValueError: If shapes or dtypes do not fit together, a gradient is asked of an integer pool, or the query heads
            of a KV head on a rank are no subtree.
    """
    _check("attention_chunks", q, kv, kv_pages, chunks.num_sequences)
    check_subtrees("attention_chunks", q.shape[2] // kv.shape[2], axis_name)
    return _attention_chunks(_scale(scale, q), numerics, schedule, axis_name, q, kv, kv_pages, chunks)


def attention_decode(
    q: Float[Array, "rows heads width"],
    kv: KV,
    kv_pages: Int32[Array, "rows pages_per_sequence"],
    decode: Decode,
    *,
    scale: float | None = None,
    numerics: Numerics = Numerics(),
) -> Float[Array, "rows heads width"]:
    """Attends from one row of each sequence, with the bits that `attention_chunks` gives the row.

    Has no gradient.

    Args:
        q: One query row of each sequence.
        kv: As in `attention_chunks`.
        kv_pages: Pages of the sequence of each row.
        decode: Where the rows stand.
        scale: Of the scores; width**-0.5 by default.
        numerics: Blocks and splits of the softmax.

    Returns:
        Output rows in the dtype of `q`; rows that are not valid are exactly zero.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
    """
    _check("attention_decode", q, kv, kv_pages, q.shape[0])
    return kernel.attention_decode(q, kv, kv_pages, decode, _scale(scale, q), numerics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _attention_chunks(scale, numerics, schedule, axis_name, q, kv, kv_pages, chunks):
    del axis_name
    return kernel.attention_chunks(q, kv, kv_pages, chunks, scale, numerics, schedule)[0]


def _forward(scale, numerics, schedule, axis_name, q, kv, kv_pages, chunks):
    if not jnp.issubdtype(kv.dtype, jnp.floating):
        raise ValueError(
            f"the gradient of attention_chunks needs a float kv, got {kv.dtype.name}{list(kv.shape)}:"
            " an integer pool serves inference; train on pages built from the batch's own K and V"
        )
    del axis_name
    output, lse = kernel.attention_chunks(q, kv, kv_pages, chunks, scale, numerics, schedule)
    return output, (q, kv, kv_pages, chunks, output, lse)


def _backward(scale, numerics, schedule, axis_name, residuals, cotangent):
    del numerics
    q, kv, kv_pages, chunks, output, lse = residuals
    q_gradient, delta = backward.query_gradient(q, kv, kv_pages, chunks, output, lse, cotangent, scale, schedule)
    kv_gradient = backward.kv_gradient(q, kv, kv_pages, chunks, lse, delta, cotangent, scale, axis_name)
    return q_gradient, kv_gradient, *jax.tree.map(_no_gradient, (kv_pages, chunks))


_attention_chunks.defvjp(_forward, _backward)


def _no_gradient(x: jax.Array):
    return jnp.zeros(x.shape, jax.dtypes.float0)


def _scale(scale: float | None, q: jax.Array) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _check(op: str, q, kv, kv_pages, sequences: int) -> None:
    if q.dtype.name not in _DTYPES:
        raise ValueError(f"{op} computes in {' or '.join(_DTYPES)}, got q {q.dtype.name}: cast q, K and V to one")
    stored = _DTYPES[q.dtype.name]
    if kv.dtype.name not in (q.dtype.name, stored):
        raise ValueError(
            f"{op} with q {q.dtype.name} reads kv {q.dtype.name} or {stored}, got {kv.dtype.name}:"
            " store K and V in the compute dtype"
        )
    _, _, kv_heads, page_tokens, kv_width = kv.shape
    heads, width = q.shape[-2:]
    if heads % kv_heads or width != kv_width:
        raise ValueError(
            f"{op} shares each KV head among a whole group of query heads of its width,"
            f" got q {list(q.shape)} and kv {list(kv.shape)}"
        )
    if page_tokens % CHUNK:
        raise ValueError(f"{op} reads pages of whole {CHUNK}-token chunks, got {page_tokens} tokens: round pages up")
    if kv_pages.shape[0] != sequences:
        raise ValueError(
            f"{op} got page tables of {kv_pages.shape[0]} sequences for {sequences}:"
            " pass the residency of the same step"
        )
