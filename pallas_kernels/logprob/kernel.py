"""Log-softmax over a vocabulary in splits: exact maximum, sums of splits, their tree, the values.

Each stage is a region over 64 rows. A rank that holds whole splits may run the first two stages on them
alone: the maxima and sums of all splits are what the third stage needs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isojax.layouts import block_of, round_up, split_bounds
from pallas_kernels.elementwise import exact_quotient
from pallas_kernels.region import exact_product
from pallas_kernels.rows import row_op
from pallas_kernels.tree_sum import fold_axis


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """What decides the bits of `logprob`."""

    num_splits: int = 8  # Contiguous splits of the padded vocabulary, leaves of the tree.

    def block(self, vocab: int) -> int:
        """Words of a block: the lanes of a split's chain."""
        return block_of(-(-vocab // self.num_splits))


def columns(vocab: int, numerics: Numerics) -> np.ndarray:
    """The word at each place of the splits `[splits, width]`, each padded to whole blocks; −1 where there is none."""
    bounds = split_bounds(vocab, numerics.num_splits)
    width = round_up(max(end - start for start, end in bounds), numerics.block(vocab))
    words = np.full((numerics.num_splits, width), -1, np.int32)
    for split, (start, end) in enumerate(bounds):
        words[split, : end - start] = np.arange(start, end)
    return words


def by_split(x: jax.Array, numerics: Numerics) -> jax.Array:
    """`x` `[rows, vocab]` as `[rows, splits, width]`; without a copy where the splits are whole blocks."""
    rows, vocab = x.shape
    if vocab % (numerics.num_splits * numerics.block(vocab)) == 0:
        return x.reshape(rows, numerics.num_splits, -1)
    width = columns(vocab, numerics).shape[1]
    splits = [x[:, start:end] for start, end in split_bounds(vocab, numerics.num_splits)]
    return jnp.stack([jnp.pad(s, ((0, 0), (0, width - s.shape[1]))) for s in splits], axis=1)


@functools.cache
def maxima(vocab: int):
    """(x `[rows, splits, width]`, T `[rows, 1]`, keep?, columns) -> the largest x/T of each split `[rows, splits]`."""

    def fn(x, temperature, *keep_and_columns):
        live = _live(x, vocab, *keep_and_columns)
        return jnp.max(jnp.where(live, exact_quotient(x, temperature[..., None]), -jnp.inf), axis=2)

    return row_op("logprob.maxima", fn, num_shared=1)


@functools.cache
def sums(vocab: int, block: int):
    """(x, T, all maxima, keep?, columns) -> Σ e and Σ e·y of each split, with y = x/T − maximum and e = exp(y).

    A chain over the blocks of a split for each lane, then a tree over lanes.
    """

    def fn(x, temperature, maxima, *keep_and_columns):
        maximum = jnp.max(maxima, axis=1)[:, None, None]

        def add(index, totals):
            x_block, *others = (lax.dynamic_slice_in_dim(a, index * block, block, -1) for a in (x, *keep_and_columns))
            y = exact_quotient(x_block, temperature[..., None]) - maximum
            e = jnp.exp(jnp.where(_live(x_block, vocab, *others), y, -jnp.inf))
            moment = jnp.where(e == 0, 0.0, exact_product(e, y))
            return totals[0] + e, totals[1] + moment

        zeros = jnp.zeros((*x.shape[:2], block), jnp.float32)
        totals = lax.fori_loop(0, x.shape[2] // block, add, (zeros, zeros))
        return tuple(fold_axis(total, 2)[..., 0] for total in totals)

    return row_op("logprob.sums", fn, num_shared=1)


def _normalise(maxima, sums, moments):
    total, moment = fold_axis(sums, 1), fold_axis(moments, 1)
    log_total = jnp.log(total)
    return jnp.max(maxima, axis=1, keepdims=True), log_total, log_total - moment / total


normalise = row_op("logprob.normalise", _normalise)
"""(maxima, sums, moments of all splits) -> maximum, log Σ e and entropy, each `[rows, 1]`: a tree over splits."""


def _values(x, live, temperature, maximum, log_total):
    # Words that cannot be drawn pass through the last subtraction too, so that a NaN in the row shows in all of them.
    return jnp.where(live, exact_quotient(x, temperature) - maximum, -jnp.inf) - log_total


values = row_op("logprob.values", _values)
"""(x `[rows, n]`, live `[rows, n]`, T, maximum, log Σ e) -> log-probabilities `[rows, n]`."""


@functools.cache
def backward(vocab: int):
    """(x `[rows, vocab]`, target, T, maximum, log Σ e, entropy, their cotangents, keep?, columns) -> dx.

    With p = exp(logprob): d logprob/dx = (1[target] − p)/T and d entropy/dx = −p·(logprob + entropy)/T.
    """

    def fn(x, target, temperature, maximum, log_total, entropy, of_logprob, of_entropy, *keep_and_columns):
        live = _live(x, vocab, *keep_and_columns)
        value = exact_quotient(x, temperature) - maximum - log_total
        p = jnp.exp(jnp.where(live, value, -jnp.inf - log_total))
        hit = (live & (keep_and_columns[-1] == target)).astype(jnp.float32)
        surprise = jnp.where(p == 0, 0.0, p * (value + entropy))
        grad = exact_product(of_logprob, hit - p) - exact_product(of_entropy, surprise)
        return exact_quotient(grad, temperature)

    return row_op("logprob.backward", fn, num_shared=1)


def _live(x, vocab, *keep_and_columns):
    """The words that can be drawn; and those with a NaN that are masked by `keep`, lest the mask hide it."""
    *keep, words = keep_and_columns
    real = (words >= 0) & (words < vocab)
    return jnp.broadcast_to(real, x.shape) if not keep else real & (keep[0] | (x != x))
