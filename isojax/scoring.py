"""Log-probabilities of given tokens, the bits that the rollout engine returned for them."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from isojax.layouts import CHUNK, round_up
from isojax.sampling import Sampling
from pallas_kernels.binding import Ops
from pallas_kernels.step import Chunks
from qwen35_moe import Config, Qwen35Moe, Step, forward, logits, tie


def logprobs(
    model: Qwen35Moe,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"] | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    padding: Literal["right", "left"] = "right",
    return_entropy: bool = False,
) -> Float32[Array, "batch length"] | tuple[Float32[Array, "batch length"], Float32[Array, "batch length"]]:
    """Scores every token of every sequence under the model, differentiably.

    A token's bits depend on its sequence up to it and on the sampling definition alone: not on
    the batch, its padding or its length, and they are those that the rollout engine returns.
    Works inside `jax.jit` and `jax.grad`.

    Args:
        model: From `isojax.from_pretrained`, or merged from its split.
        tokens: Token ids.
        lengths: Tokens of each sequence; by default all are full.
        temperature: As sampled.
        top_k: As sampled.
        top_p: As sampled.
        min_p: As sampled.
        padding: The side that shorter sequences are padded on.
        return_entropy: Whether to return the entropy of each token's distribution too, in nats.

    Returns:
        `logps[b, t]`, float32, scores `tokens[b, t]` given those before it. A sequence's first
        token, and padding, score 0. A token that top_k, top_p or min_p leave out, as they may one that they did not
        draw, scores −∞: choose what a loss reads with `jnp.where`, since a product with 0 is no choice.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    batch, length = tokens.shape
    lengths = jnp.full(batch, length, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    shift = length - lengths if padding == "left" else jnp.zeros_like(lengths)
    column = jnp.arange(length)
    aligned = jnp.take_along_axis(tokens.astype(jnp.int32), (column + shift[:, None]) % length, axis=1)
    blocks = round_up(length, CHUNK) // CHUNK
    grid = jnp.pad(aligned, ((0, 0), (0, blocks * CHUNK - length)))
    chunks = Chunks(
        sequence=jnp.repeat(jnp.arange(batch, dtype=jnp.int32), blocks),
        index=jnp.tile(jnp.arange(blocks, dtype=jnp.int32), batch),
        begin=jnp.zeros(batch * blocks, jnp.int32),
        end=jnp.clip(lengths[:, None] - CHUNK * jnp.arange(blocks), 0, CHUNK).reshape(-1).astype(jnp.int32),
        num_sequences=batch,
    )
    targets = jnp.roll(grid, -1, axis=1)
    scores = score_rows(model, grid.reshape(-1), targets.reshape(-1), chunks, sampling)
    there = column[None, :-1] < lengths[:, None] - 1

    def place(rows: jax.Array) -> jax.Array:
        rows = jnp.where(there, rows.reshape(batch, -1)[:, : length - 1], 0.0)
        return _roll(jnp.pad(rows, ((0, 0), (1, 0))), shift)

    logps, entropy = map(place, scores)
    return (logps, entropy) if return_entropy else logps


def score_rows(
    model: Qwen35Moe,
    tokens: Int32[Array, " rows"],
    targets: Int32[Array, " rows"],
    chunks: Chunks,
    sampling: Sampling,
    *,
    remat: bool = False,
) -> tuple[Float32[Array, " rows"], Float32[Array, " rows"]]:
    """Log-probability of each row's target, and entropy in nats; rows that are not there hold anything."""
    config, ops = model.config, model.ops
    step = Step(tokens, None, chunks)
    params = tie(model.params(), config, ops)
    hidden, _, _ = forward(params, step, config, ops, remat=remat)
    return score_hidden(params, hidden, targets, config, ops, sampling, step.segments)


def score_hidden(params: Any, hidden, targets, config: Config, ops: Ops, sampling: Sampling, segments=None):
    """The last step of `score_rows`, from hidden rows of any phase."""
    scores = logits(params, hidden, config, ops, segments=segments)
    return score_logits(scores, targets, ops, sampling, config.num_words)


def score_logits(
    scores: Float32[Array, "rows vocab"],
    targets: Int32[Array, " rows"],
    ops: Ops,
    sampling: Sampling,
    vocab: int | None = None,
) -> tuple[Float32[Array, " rows"], Float32[Array, " rows"]]:
    """Log-probability and entropy in the distribution of `sampling`: of a target that it leaves out, −∞.

    Which words are left out is computed as the engine computed it, row by row. Gradients take it as given. Only the
    first `vocab` columns are words (`Config.num_words`), by default all.
    """
    keep = None
    if sampling.truncated:
        kinds = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32, "min_p": jnp.float32}
        settings = {name: jnp.full(len(scores), getattr(sampling, name), kind) for name, kind in kinds.items()}
        keep = ops.truncation_mask(scores, **settings, vocab=vocab)
    return ops.logprob(scores, targets, temperature=sampling.temperature, vocab=vocab, keep=keep)


@jax.custom_vjp
def _roll(x: jax.Array, shift: jax.Array) -> jax.Array:
    """Each row of `x` moved right by its shift; backward moves left, where autodiff would scatter and add."""
    length = x.shape[1]
    return jnp.take_along_axis(x, (jnp.arange(length) - shift[:, None]) % length, axis=1)


_roll.defvjp(lambda x, shift: (_roll(x, shift), shift), lambda shift, grad: (_roll(grad, -shift), None))
