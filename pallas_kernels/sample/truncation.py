"""Which words top-k, top-p and min-p leave to be drawn."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.elementwise import exact_quotient
from pallas_kernels.ordering import ordered
from pallas_kernels.region import exact_product
from pallas_kernels.rows import row_op
from pallas_kernels.sharding import AxisName

_BLOCK = 128  # Words of a block of the cumulative sum: decides bits.


def truncation_mask(
    logits: Float32[Array, "rows vocab"],
    *,
    temperature: Float32[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    vocab: int | None = None,
    axis_name: AxisName | None = None,
) -> Bool[Array, "rows vocab"]:
    """The words that each row may draw: vLLM's min-p, then top-k, then top-p.

    Words rank by descending logit, equal ones by ascending word, and a row keeps its first n:
    those at least `min_p` times as likely as the first; at most `top_k`; and, of these, as few as hold `top_p` of
    their mass. At least one is kept. The ranking is integer work, on the bits of the logits. The mass before a word is
    a region: inside blocks of 128 ranked words the doubling scan of Hillis & Steele (1986), over blocks a chain.
    A row's mask depends on that row alone. (vLLM keeps all words that equal the last; here the lower word stays.)

    Args:
        logits: Scores of all words, padded ones included, in float32; with `axis_name` of the words of this rank.
        temperature: Of each row, as the tokens are drawn; for greedy rows `reported`.
        top_k: Most words to keep; below 1 for all.
        top_p: Mass to keep; 1 or more for all.
        min_p: Least probability over that of the likeliest word; 0 for all.
        vocab: How many words are real; the padded ones are not kept. All by default.
        axis_name: The mesh axis that words are sharded over, inside `shard_map`. Logits are gathered: the ranking
            needs them all, and every rank makes it.

    Returns:
        Whether each word (of this rank) is kept. A NaN ranks first, so that its row shows it.

    Raises:
        ValueError: If `vocab` is not within the logits.
    """
    own = logits.shape[1]
    if axis_name is not None:
        logits = lax.all_gather(logits, axis_name, axis=1, tiled=True)
    rows, width = logits.shape
    if vocab is not None and not 1 <= vocab <= width:
        raise ValueError(f"truncation_mask got vocab={vocab} real words of {width} logits: pass 1 to {width}")
    vocab = width if vocab is None else vocab
    words = lax.broadcasted_iota(jnp.int32, (rows, vocab), 1)
    logits = lax.stop_gradient(logits)
    order = ordered(logits[:, :vocab])
    descending, ranked = lax.sort((~order, words), dimension=1, num_keys=2)
    scores = jnp.take_along_axis(logits, ranked, axis=1)
    scores = jnp.pad(scores, ((0, 0), (0, -vocab % _BLOCK)))
    settings = (x[:, None] for x in (temperature, top_k, top_p, min_p))
    last = _kept(vocab)(scores, *settings) - 1
    last_order, last_word = ~jnp.take_along_axis(descending, last, axis=1), jnp.take_along_axis(ranked, last, axis=1)
    keep = (order > last_order) | ((order == last_order) & (words <= last_word))
    keep = jnp.pad(keep, ((0, 0), (0, width - vocab)))
    return keep if axis_name is None else lax.dynamic_slice_in_dim(keep, lax.axis_index(axis_name) * own, own, axis=1)


@functools.cache
def _kept(vocab: int):
    """(ranked logits `[rows, vocab]`, T, k, p, min p, each `[rows, 1]`) -> how many words are kept `[rows, 1]`."""

    def fn(scores, temperature, top_k, top_p, min_p):
        rank = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scaled = exact_quotient(scores, temperature)
        e = jnp.exp(scaled - lax.optimization_barrier(jnp.broadcast_to(scaled[:, :1], scores.shape)))
        limit = jnp.where(top_k < 1, vocab, jnp.minimum(top_k, vocab))
        likely = (rank < limit) & (e >= min_p)
        before, total = _mass_before(jnp.where(likely, e, 0.0))
        inside = (before < exact_product(jnp.broadcast_to(top_p, total.shape), total)) | (top_p >= 1)
        dropped = jnp.where(likely & inside, vocab, rank)
        return jnp.clip(jnp.min(dropped, axis=1, keepdims=True), 1, vocab)

    return row_op("truncation_mask", fn)


def _mass_before(e: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each place the sum of the places before it `[rows, vocab]`, and the sum of all `[rows, 1]`."""
    rows, width = e.shape
    blocks = width // _BLOCK
    inside = e.reshape(rows, blocks, _BLOCK)
    for shift in (1 << i for i in range(_BLOCK.bit_length() - 1)):
        inside = inside + _shifted(inside, shift)

    def add(block, carry):
        offsets, total = carry
        offsets = lax.dynamic_update_slice_in_dim(offsets, total, block, axis=1)
        return offsets, total + lax.dynamic_slice_in_dim(inside[:, :, -1], block, 1, axis=1)

    start = jnp.zeros((rows, blocks), jnp.float32), jnp.zeros((rows, 1), jnp.float32)
    offsets, total = lax.fori_loop(0, blocks, add, start)
    return (offsets[:, :, None] + _shifted(inside, 1)).reshape(rows, width), total


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """`x` moved `by` places up its last axis; zeros come in."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), (by, -by, 0)])
