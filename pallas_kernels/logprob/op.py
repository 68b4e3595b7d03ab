"""What the policy thinks of a token: the one routine of sampler, scorer and loss."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.logprob import kernel
from pallas_kernels.logprob.kernel import Numerics

type Temperature = float | Float32[Array, ""] | Float32[Array, " rows"]


def logprob(
    logits: Float32[Array, "rows vocab"],
    targets: Int32[Array, " rows"],
    *,
    temperature: float | Float32[Array, ""] | Float32[Array, " rows"],
    vocab: int | None = None,
    keep: Bool[Array, "rows vocab"] | None = None,
    numerics: Numerics = Numerics(),
) -> tuple[Float32[Array, " rows"], Float32[Array, " rows"]]:
    """The log-probability of each target and the entropy of each row, in nats.

    Both are of the distribution that the token is drawn from: log-softmax of logits / temperature over the
    words below `vocab` that `keep` keeps. The maximum is exact. Exponentials are added in `num_splits` contiguous
    splits of the padded vocabulary: in each a chain over blocks, every lane for itself, then a tree over lanes; a tree
    over splits. A row's bits depend on that row alone, and a mask that keeps every word is no mask.

    A NaN among the words below `vocab`, kept or not, makes the row NaN, and so do infinite logits: nothing hides them.

    Greedy rows (temperature below 1e-5 for vLLM) are drawn by argmax and reported at temperature 1 without a
    mask: `sample.reported` gives the temperature to pass.

    Args:
        logits: Scores of all words, padded ones included, in float32.
        targets: A word for every row; one that cannot be drawn has log-probability −∞.
        temperature: Of all rows or of each, above zero. It has no gradient: it is a setting.
        vocab: How many words are real; the padded ones after them do not count. All by default.
        keep: The words that top-k, top-p and min-p leave (`sample.truncation_mask`); all by default.
        numerics: What decides bits.

    Returns:
        Log-probabilities and entropies. Their gradients reach `logits`, as a region, in float32.

    Raises:
        ValueError: If `temperature` is a number that is not above zero, or `vocab` is not within the logits.
    """
    static = (_checked_vocab(logits, vocab), numerics)
    return _logprob(static, logits, targets, _by_row(temperature, logits), keep)


def logprobs_all(
    logits: Float32[Array, "rows vocab"],
    *,
    temperature: float | Float32[Array, ""] | Float32[Array, " rows"],
    vocab: int | None = None,
    keep: Bool[Array, "rows vocab"] | None = None,
    numerics: Numerics = Numerics(),
) -> Float32[Array, "rows vocab"]:
    """The log-probability of every word: column t has the bits of `logprob` for target t.

    For the lists that an engine returns. Words that cannot be drawn have −∞. It has no gradient.

    Args: as `logprob`.

    Raises:
        ValueError: As `logprob`.
        TypeError: If it is differentiated.
    """
    static = (_checked_vocab(logits, vocab), numerics)
    return _logprobs_all(static, logits, _by_row(temperature, logits), keep)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(static, logits, targets, temperature, keep):
    return _forward(static, logits, targets, temperature, keep)[0]


def _forward(static, logits, targets, temperature, keep):
    maximum, log_total, entropy = _normalisers(static, logits, temperature, keep)
    index = targets[:, None]
    live = (index >= 0) & (index < static[0])
    if keep is not None:
        live &= jnp.take_along_axis(keep, index, axis=1, mode="clip")
    chosen = jnp.take_along_axis(logits, index, axis=1, mode="clip")
    value = kernel.values(chosen, live, temperature, maximum, log_total)
    residuals = (logits, targets, temperature, keep, maximum, log_total, entropy)
    return (value[:, 0], entropy[:, 0]), residuals


def _backward(static, residuals, cotangents):
    logits, targets, temperature, keep, maximum, log_total, entropy = residuals
    of_logprob, of_entropy = (g[:, None] for g in cotangents)
    grad = kernel.backward(static[0])(
        logits,
        targets[:, None],
        temperature,
        maximum,
        log_total,
        entropy,
        of_logprob,
        of_entropy,
        *_given(keep),
        jnp.arange(logits.shape[1], dtype=jnp.int32),
    )
    return grad, None, None, None


_logprob.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs_all(static, logits, temperature, keep):
    live = jnp.broadcast_to(jnp.arange(logits.shape[1]) < static[0], logits.shape)
    maximum, log_total, _ = _normalisers(static, logits, temperature, keep)
    return kernel.values(logits, live if keep is None else live & keep, temperature, maximum, log_total)


def _no_gradient(*_):
    raise TypeError("logprobs_all has no gradient: differentiate logprob, whose values are the same")


_logprobs_all.defvjp(_no_gradient, _no_gradient)


def _normalisers(static, logits, temperature, keep):
    vocab, numerics = static
    words = jnp.asarray(kernel.columns(logits.shape[1], numerics))
    x, *mask = (kernel.by_split(a, numerics) for a in (logits, *_given(keep)))
    maxima = kernel.maxima(vocab)(x, temperature, *mask, words)
    sums, moments = kernel.sums(vocab, numerics.block(logits.shape[1]))(x, temperature, maxima, *mask, words)
    return kernel.normalise(maxima, sums, moments)


def _given(keep) -> tuple[jax.Array, ...]:
    return () if keep is None else (keep,)


def _by_row(temperature: Temperature, logits: jax.Array) -> jax.Array:
    if isinstance(temperature, float | int) and not temperature > 0:
        raise ValueError(
            f"logprob divides by the temperature, got {temperature}: greedy tokens are reported at temperature 1.0"
        )
    by_row = jnp.asarray(temperature, jnp.float32).reshape(-1, 1)
    return jnp.broadcast_to(by_row, (logits.shape[0], 1))


def _checked_vocab(logits: jax.Array, vocab: int | None) -> int:
    width = logits.shape[1]
    if vocab is not None and not 1 <= vocab <= width:
        raise ValueError(f"logprob got vocab={vocab} real words of {width} logits: pass 1 to {width}")
    return width if vocab is None else vocab
