"""What the policy thinks of a token: the one routine of sampler, scorer and loss."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.logprob import kernel
from pallas_kernels.logprob.kernel import Numerics
from pallas_kernels.sharding import AxisName, axis_size, splits_of_rank

type Temperature = float | Float32[Array, ""] | Float32[Array, " rows"]


def logprob(
    logits: Float32[Array, "rows vocab"],
    targets: Int32[Array, " rows"],
    *,
    temperature: float | Float32[Array, ""] | Float32[Array, " rows"],
    vocab: int | None = None,
    keep: Bool[Array, "rows vocab"] | None = None,
    axis_name: AxisName | None = None,
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

    Inside `shard_map` with `axis_name` a rank has its run of the words, and the bits of one device: maxima and sums of
    splits are gathered, the target's score comes from whichever rank has it, and every rank gets every result.

    Args:
        logits: Scores of all words, padded ones included, in float32; with `axis_name` of the words of this rank.
        targets: A word for every row; one that cannot be drawn has log-probability −∞.
        temperature: Of all rows or of each, above zero. It has no gradient: it is a setting.
        vocab: How many words of all ranks are real; the padded ones after them do not count. All by default.
        keep: The words that top-k, top-p and min-p leave (`sample.truncation_mask`), as `logits`; all by default.
        axis_name: The mesh axis that words are sharded over.
        numerics: What decides bits.

    Returns:
        Log-probabilities and entropies. Their gradients reach `logits`, as a region, in float32.

    Raises:
        ValueError: If `temperature` is a number that is not above zero, `vocab` is not within the logits, or ranks do
            not hold whole splits.
    """
    static = _checked("logprob", logits, vocab, numerics, axis_name)
    return _logprob(static, logits, targets, _by_row(temperature, logits), keep)


def logprobs_all(
    logits: Float32[Array, "rows vocab"],
    *,
    temperature: float | Float32[Array, ""] | Float32[Array, " rows"],
    vocab: int | None = None,
    keep: Bool[Array, "rows vocab"] | None = None,
    axis_name: AxisName | None = None,
    numerics: Numerics = Numerics(),
) -> Float32[Array, "rows vocab"]:
    """The log-probability of every word: column t has the bits of `logprob` for target t.

    For the lists that an engine returns. Words that cannot be drawn have −∞. It has no gradient. With `axis_name` a
    rank gets its words.

    Args: as `logprob`.

    Raises:
        ValueError: As `logprob`.
        TypeError: If it is differentiated.
    """
    static = _checked("logprobs_all", logits, vocab, numerics, axis_name)
    return _logprobs_all(static, logits, _by_row(temperature, logits), keep)


class _Static(NamedTuple):
    vocab: int  # Real words of all ranks.
    numerics: Numerics
    axis_name: AxisName | None

    def words(self, width: int) -> jax.Array:
        """The words whose scores are on this rank, of which there are `width`."""
        words = jnp.arange(width, dtype=jnp.int32)
        return words if self.axis_name is None else words + lax.axis_index(self.axis_name) * width

    def of_all(self, x: jax.Array) -> jax.Array:
        """`x` `[rows, n]` of all ranks, by rank."""
        return x if self.axis_name is None else lax.all_gather(x, self.axis_name, axis=1, tiled=True)

    def at(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """`x` `[rows, words]` at the word `index` `[rows, 1]`, on every rank."""
        if self.axis_name is None:
            return jnp.take_along_axis(x, index, axis=1, mode="clip")
        width = x.shape[1]
        own = jnp.take_along_axis(x, index - lax.axis_index(self.axis_name) * width, axis=1, mode="clip")
        return jnp.take_along_axis(self.of_all(own), index // width, axis=1, mode="clip")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(static: _Static, logits, targets, temperature, keep):
    return _forward(static, logits, targets, temperature, keep)[0]


def _forward(static, logits, targets, temperature, keep):
    maximum, log_total, entropy = _normalisers(static, logits, temperature, keep)
    index = targets[:, None]
    live = (index >= 0) & (index < static.vocab)
    if keep is not None:
        live &= static.at(keep, index)
    value = kernel.values(static.at(logits, index), live, temperature, maximum, log_total)
    residuals = (logits, targets, temperature, keep, maximum, log_total, entropy)
    return (value[:, 0], entropy[:, 0]), residuals


def _backward(static, residuals, cotangents):
    logits, targets, temperature, keep, maximum, log_total, entropy = residuals
    of_logprob, of_entropy = (g[:, None] for g in cotangents)
    grad = kernel.backward(static.vocab)(
        logits,
        targets[:, None],
        temperature,
        maximum,
        log_total,
        entropy,
        of_logprob,
        of_entropy,
        *_given(keep),
        static.words(logits.shape[1]),
    )
    return grad, None, None, None


_logprob.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs_all(static, logits, temperature, keep):
    live = jnp.broadcast_to(static.words(logits.shape[1]) < static.vocab, logits.shape)
    maximum, log_total, _ = _normalisers(static, logits, temperature, keep)
    return kernel.values(logits, live if keep is None else live & keep, temperature, maximum, log_total)


def _no_gradient(*_):
    raise TypeError("logprobs_all has no gradient: differentiate logprob, whose values are the same")


_logprobs_all.defvjp(_no_gradient, _no_gradient)


def _normalisers(static, logits, temperature, keep):
    vocab, numerics, axis_name = static
    width = logits.shape[1] * axis_size(axis_name)
    words = jnp.asarray(kernel.columns(width, numerics))
    local = numerics
    if axis_name is not None:
        local = dataclasses.replace(numerics, num_splits=numerics.num_splits // axis_size(axis_name))
        words = lax.dynamic_slice_in_dim(words, lax.axis_index(axis_name) * local.num_splits, local.num_splits)
    x, *mask = (kernel.by_split(a, local) for a in (logits, *_given(keep)))
    maxima = static.of_all(kernel.maxima(vocab)(x, temperature, *mask, words))
    sums, moments = kernel.sums(vocab, numerics.block(width))(x, temperature, maxima, *mask, words)
    return kernel.normalise(maxima, static.of_all(sums), static.of_all(moments))


def _given(keep) -> tuple[jax.Array, ...]:
    return () if keep is None else (keep,)


def _by_row(temperature: Temperature, logits: jax.Array) -> jax.Array:
    if isinstance(temperature, float | int) and not temperature > 0:
        raise ValueError(
            f"logprob divides by the temperature, got {temperature}: greedy tokens are reported at temperature 1.0"
        )
    by_row = jnp.asarray(temperature, jnp.float32).reshape(-1, 1)
    return jnp.broadcast_to(by_row, (logits.shape[0], 1))


def _checked(name: str, logits, vocab: int | None, numerics: Numerics, axis_name: AxisName | None) -> _Static:
    splits_of_rank(name, "num_splits", numerics.num_splits, axis_name)
    width = logits.shape[1] * axis_size(axis_name)
    if vocab is not None and not 1 <= vocab <= width:
        raise ValueError(f"{name} got vocab={vocab} real words of {width} logits: pass 1 to {width}")
    return _Static(width if vocab is None else vocab, numerics, axis_name)
