"""Draws the next token of every row."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pallas_kernels.elementwise import exact_quotient
from pallas_kernels.rows import row_op
from pallas_kernels.sample.keys import threefry

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
) -> Int32[Array, " rows"]:
    """Draws a word for each row from softmax(logits / temperature) over the words that are real and kept.

    By Gumbel's trick: the word with the largest logit/temperature + noise, the lowest of equals. The noise of a
    word is a hash of the row's key and the word, so a row's token depends on that row alone. Rows
    with a temperature below `GREEDY` take the largest logit.

    Args:
        logits: Scores of all words, padded ones included, in float32.
        keys: `sample_key` of each row.
        temperature: Of each row.
        keep: The words that top-k, top-p and min-p leave (`truncation_mask`); all by default.
        vocab: How many words are real; the padded ones after them are never drawn. All by default.

    Returns:
        Words below `vocab`. A row with a NaN draws some word, and has a NaN for its log-probability.

    Raises:
        ValueError: If `vocab` is not within the logits.
    """
    width = logits.shape[1]
    if vocab is not None and not 1 <= vocab <= width:
        raise ValueError(f"sample got vocab={vocab} real words of {width} logits: pass 1 to {width}")
    pad = ((0, 0), (0, -width % 128))
    rows = [jnp.pad(lax.stop_gradient(logits), pad), keys, temperature[:, None]] + (
        [] if keep is None else [jnp.pad(keep, pad)]
    )
    return _op(width if vocab is None else vocab)(*rows)[:, 0]


@functools.cache
def _op(vocab: int):
    def fn(logits, keys, temperature, *keep):
        words = jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.uint32), logits.shape)
        greedy = temperature < GREEDY
        random, _ = threefry((keys[:, :1], keys[:, 1:]), (words, jnp.zeros_like(words)))
        noise = jnp.where(greedy, 0.0, _gumbel(random))
        scores = exact_quotient(logits, jnp.where(greedy, 1.0, temperature)) + noise
        live = words < vocab
        for mask in keep:
            live &= mask
        # The largest of ordinary scores is above -inf, and argmax gives the first of equals.
        return jnp.argmax(jnp.where(live, scores, -jnp.inf), axis=1, keepdims=True).astype(jnp.int32)

    return row_op("sample", fn)


def _gumbel(random: jax.Array) -> jax.Array:
    """Standard Gumbel noise, −log(−log(1 − v)) with v = (random + ½)/2³²: small v keep all their digits."""
    v = random.astype(jnp.float32) * 2.0**-32 + 2.0**-33
    return -jnp.log(-jnp.log1p(-jnp.minimum(v, 1 - 2.0**-24)))
