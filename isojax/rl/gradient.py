"""The gradient of a batch: one forward a micro-batch, and sums that no micro-batch size can change."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from isojax.layouts import CHUNK, Segments
from isojax.rl.losses import TokenFields, TokenLoss, grpo_loss
from isojax.rl.packing import Batch, MicroBatch
from isojax.sampling import Sampling
from isojax.scoring import score_rows
from pallas_kernels.rows import row_op
from pallas_kernels.step import Chunks
from pallas_kernels.tree_sum import add_gradients


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """What the loss's own forward computed of a batch.

    Attributes:
        logprobs: Of each row's target.
        entropy: Of the distribution each target was drawn from, in nats.
        loss: Mean over the batch's sampled tokens; 0 where no loss was asked for.
    """

    logprobs: Float[np.ndarray, " rows"]
    entropy: Float[np.ndarray, " rows"]
    loss: float = 0.0


class _Rows(NamedTuple):
    """A micro-batch on the device, padded to a bucket."""

    tokens: Int32[Array, " rows"]
    targets: Int32[Array, " rows"]
    mask: Bool[Array, " rows"]
    weight: Float[Array, " rows"]
    fields: TokenFields
    chunks: Chunks


class _Sum(NamedTuple):
    """What is added over sequences: part of a tree inside a gradient group, then a chain over groups."""

    grads: Any
    loss: Float[Array, ""]


def policy_gradient(
    model: nnx.Module, batch: Batch, loss_fn: TokenLoss = grpo_loss, *, remat: bool = False
) -> tuple[nnx.State, Scores]:
    """Gradient of the mean token loss, with the log-probabilities of the same forward.

    The bits depend on the batch's sequences and their order alone: not on the micro-batches, nor
    on `remat`. Sequences of one gradient group meet in tree order, groups form a chain, in float32.

    Args:
        model: From `isojax.from_pretrained`.
        batch: From `pack`.
        loss_fn: The loss of single tokens.
        remat: Whether to compute the forward of a period of layers again in backward, to save memory.

    Returns:
        The gradient of the model's parameters in float32, as `nnx.Optimizer.update` takes it, and
        the scores of every row of the batch.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    scores, sums = [], _Tree()
    total: _Sum | None = None
    for micro in batch.micro_batches:
        rows = _device_rows(batch, micro)
        part, logprobs, entropy = _micro_gradient(
            graphdef, params, rest, rows, _Loss.of(loss_fn), batch.sampling, micro.count, remat
        )
        scores.append(_host_rows(micro, logprobs, entropy))
        sums.push(part, micro.count)
        if sums.size == batch.group:
            group = sums.pop()
            total = group if total is None else _add(total, group)
    if sums.size:
        group = sums.close(batch.group)
        total = group if total is None else _add(total, group)
    assert total is not None  # A batch has at least one sequence.
    return total.grads, Scores(*map(np.concatenate, zip(*scores, strict=True)), loss=float(total.loss))


def score(model: nnx.Module, batch: Batch) -> Scores:
    """The log-probabilities of a batch without a gradient: the bits of `policy_gradient`."""
    graphdef, state = nnx.split(model)
    scores = []
    for micro in batch.micro_batches:
        rows = _device_rows(batch, micro)
        scores.append(_host_rows(micro, *_micro_scores(graphdef, state, rows, batch.sampling)))
    return Scores(*map(np.concatenate, zip(*scores, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Loss:
    """A token loss as a hashable region; equal partials of one function compile once."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, loss_fn: TokenLoss) -> "_Loss":
        if isinstance(loss_fn, functools.partial):
            return cls(loss_fn.func, loss_fn.args, tuple(sorted(loss_fn.keywords.items())))
        return cls(loss_fn, (), ())

    def __call__(self, logprobs, entropy, mask, weight, *fields):
        # Rows that are not there hold anything: let no NaN of theirs into a product with zero.
        logprobs, entropy = (jnp.where(mask, x, 0.0) for x in (logprobs, entropy))
        loss = self.function(*self.args, logprobs, entropy, TokenFields(*fields), **dict(self.keywords))
        return jnp.where(mask, loss * weight, 0.0)

    @functools.cached_property
    def op(self) -> Callable[..., jax.Array]:
        return row_op("loss", self.__call__)


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6, 7))
def _micro_gradient(graphdef, params, rest, rows: _Rows, loss: _Loss, sampling: Sampling, count: int, remat: bool):
    def mean_loss(params):
        model = nnx.merge(graphdef, params, rest)
        logprobs, entropy = score_rows(model, rows.tokens, rows.targets, rows.chunks, sampling, remat=remat)
        terms = loss.op(logprobs, entropy, rows.mask, rows.weight, *rows.fields)
        return model.ops.sum_tokens(terms, Segments(rows.chunks.sequence, count)), (logprobs, entropy)

    (value, (logprobs, entropy)), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
    return _Sum(grads, value), logprobs, entropy


@functools.partial(jax.jit, static_argnums=(0, 3))
def _micro_scores(graphdef, state, rows: _Rows, sampling: Sampling):
    return score_rows(nnx.merge(graphdef, state), rows.tokens, rows.targets, rows.chunks, sampling)


@functools.partial(jax.jit, donate_argnums=0)
def _add(a: _Sum, b: _Sum) -> _Sum:
    return jax.tree.map(add_gradients, a, b)


class _Tree:
    """A tree over aligned runs of sequences, folded as they come: at most log2(group) + 1 partial sums live."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, _Sum]] = []  # (sequences, sum), larger runs first

    @property
    def size(self) -> int:
        return sum(count for count, _ in self._parts)

    def push(self, part: _Sum, count: int) -> None:
        while self._parts and self._parts[-1][0] == count:
            part = _add(self._parts.pop()[1], part)
            count *= 2
        self._parts.append((count, part))

    def pop(self) -> _Sum:
        """The sum of the one run that is there."""
        [(_, total)] = self._parts
        self._parts.clear()
        return total

    def close(self, size: int) -> _Sum:
        """The sum of a run of `size` whose missing sequences are zero."""
        while self.size < size:
            count, part = self._parts[-1]
            self.push(jax.tree.map(jnp.zeros_like, part), count)
        return self.pop()


def _device_rows(batch: Batch, micro: MicroBatch) -> _Rows:
    size, blocks = micro.blocks * CHUNK, slice(micro.rows.start // CHUNK, micro.rows.stop // CHUNK)

    def pad(values: np.ndarray, to: int) -> np.ndarray:
        return np.pad(values, (0, to - len(values)))

    mask = batch.mask[micro.rows]
    reference = batch.rollout_logprobs if batch.reference_logprobs is None else batch.reference_logprobs
    fields = (batch.rollout_logprobs, batch.advantages, reference)
    end = pad(batch.end[blocks], micro.blocks)
    # Padding blocks come last: they must not open a sequence of their own.
    sequence = np.full(micro.blocks, micro.count - 1, np.int32)
    sequence[: blocks.stop - blocks.start] = batch.sequence[blocks] - micro.first
    grid = (sequence, pad(batch.index[blocks], micro.blocks), np.zeros_like(end), end)
    chunks = Chunks(*map(jnp.asarray, grid), num_sequences=micro.count)
    return jax.device_put(
        _Rows(
            tokens=pad(batch.tokens[micro.rows], size),
            targets=pad(batch.targets[micro.rows], size),
            mask=pad(mask, size),
            weight=pad(mask / np.float32(batch.num_tokens), size).astype(np.float32),
            fields=TokenFields(*(pad(field[micro.rows], size) for field in fields)),
            chunks=chunks,
        )
    )


def _host_rows(micro: MicroBatch, *rows: jax.Array) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x)[: micro.rows.stop - micro.rows.start] for x in rows)
