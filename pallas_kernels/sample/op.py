"""Draws the next token of every row."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pallas_kernels.elementwise import exact_quotient
from pallas_kernels.rows import row_op
from pallas_kernels.sample.keys import threefry
from pallas_kernels.sharding import AxisName, axis_size

GREEDY = 1e-5
"""Below this temperature the likeliest word is drawn, as in vLLM."""


def reported(temperature: Float32[Array, " rows"]) -> Float32[Array, " rows"]:
    """The temperature that log-probabilities are reported at: 1 for greedy rows, whose draw has no temperature."""
    return jnp.where(temperature < GREEDY, jnp.float32(1), temperature)


def sample(
    logits: Float32[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    temperature: Float32[Array, " rows"],
    keep: Bool[Array, "rows vocab"] | None = None,
    *,
    vocab: int | None = None,
    axis_name: AxisName | None = None,
) -> Int32[Array, " rows"]:
    """Draws a word for each row from softmax(logits / temperature) over the words that are real and kept.

    By Gumbel's trick: the word with the largest logit/temperature + noise, the lowest of equals. The noise of a
    word is a hash of the row's key and the word, so a row's token depends on that row alone. Rows
    with a temperature below `GREEDY` take the largest logit.

    Inside `shard_map` with `axis_name` a rank has its run of the words; a score and a word of each rank meet, and all
    ranks draw the token of one device.

    Args:
        logits: Scores of all words, padded ones included, in float32; with `axis_name` of the words of this rank.
        keys: `sample_key` of each row.
        temperature: Of each row.
        keep: The words that top-k, top-p and min-p leave (`truncation_mask`); all by default.
        vocab: How many words are real; the padded ones after them are never drawn. All by default.
        axis_name: The mesh axis that words are sharded over, equally many on every rank.

    Returns:
        Words below `vocab`. A row with a NaN draws some word, and has a NaN for its log-probability.

    Raises:
        ValueError: If `vocab` is not within the logits.
    """
    own = logits.shape[1]
    width = own * axis_size(axis_name)
    if vocab is not None and not 1 <= vocab <= width:
        raise ValueError(f"sample got vocab={vocab} real words of {width} logits: pass 1 to {width}")
    vocab = width if vocab is None else vocab
    pad = ((0, 0), (0, -own % 128))
    rows = [jnp.pad(lax.stop_gradient(logits), pad), keys, temperature[:, None]] + (
        [] if keep is None else [jnp.pad(keep, pad)]
    )
    if axis_name is None:
        return _op(vocab)(*rows)[:, 0]
    first = jnp.broadcast_to(jnp.uint32(lax.axis_index(axis_name) * own), (logits.shape[0], 1))
    best = _of_rank(vocab, own)(first, *rows)
    return _of_ranks(*(lax.all_gather(x, axis_name, axis=1, tiled=True) for x in best))[:, 0]


@functools.cache
def _op(vocab: int):
    def fn(logits, *rest):
        words = jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.uint32), logits.shape)
        # The largest of ordinary scores is above -inf, and argmax gives the first of equals.
        return jnp.argmax(_scores(words, words < vocab, logits, *rest), axis=1, keepdims=True).astype(jnp.int32)

    return row_op("sample", fn)


@functools.cache
def _of_rank(vocab: int, own: int):
    """(first word, logits, ...) -> the largest score of a rank's words and the lowest word that has it `[rows, 1]`."""

    def fn(first, logits, *rest):
        index = jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.uint32), logits.shape)
        words = index + first
        scores = _scores(words, (words < vocab) & (index < own), logits, *rest)
        best = jnp.max(scores, axis=1, keepdims=True)
        return best, first.astype(jnp.int32) + jnp.argmax(scores, axis=1, keepdims=True).astype(jnp.int32)

    return row_op("sample", fn)


def _lowest_of_best(scores: jax.Array, words: jax.Array) -> jax.Array:
    """Words `[rows, 1]` of the largest of the ranks' scores; ranks hold ascending words."""
    first = jnp.argmax(scores, axis=1, keepdims=True)
    rank = lax.broadcasted_iota(first.dtype, scores.shape, 1)
    return jnp.sum(jnp.where(rank == first, words, 0), axis=1, keepdims=True)


_of_ranks = row_op("sample", _lowest_of_best)


def _scores(words, live, logits, keys, temperature, *keep):
    """logit/temperature + noise of each word, −∞ of those that cannot be drawn."""
    greedy = temperature < GREEDY
    random, _ = threefry((keys[:, :1], keys[:, 1:]), (words, jnp.zeros_like(words)))
    noise = jnp.where(greedy, 0.0, _gumbel(random))
    scores = exact_quotient(logits, jnp.where(greedy, 1.0, temperature)) + noise
    for mask in keep:
        live &= mask
    return jnp.where(live, scores, -jnp.inf)


def _gumbel(random: jax.Array) -> jax.Array:
    """Standard Gumbel noise, −log(−log(1 − v)) with v = (random + ½)/2³²: small v keep all their digits."""
    v = random.astype(jnp.float32) * 2.0**-32 + 2.0**-33
    return -jnp.log(-jnp.log1p(-jnp.minimum(v, 1 - 2.0**-24)))
