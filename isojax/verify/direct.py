"""Rows without an engine: the trainer's forward against every phase, run by hand."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from isojax.layouts import CHUNK
from isojax.models import from_pretrained
from isojax.rl.gradient import policy_gradient, score
from isojax.rl.packing import Batch, cut, pack_samples
from isojax.samples import Sample
from isojax.sampling import Sampling
from isojax.scoring import logprobs
from isojax.verify.phases import Phases, Plan
from isojax.verify.report import Row
from qwen35_moe import Qwen35Moe

LENGTHS = (2, 63, 64, 65, 66, 127, 128, 129, 130, 191, 192, 193, 200, 256, 257, 320, 321, 333)
"""Sequences on both sides of chunk borders, and over several chunks and pages."""

MATES = (1, 7, 33)
PIECES = (1, 63, 64, 65, 100, 256)
PLANS = (
    Plan("prefill in one piece"),
    *(Plan(f"prefill in pieces of {piece}", piece=piece) for piece in PIECES),
    *(Plan(f"prefill under a shared budget of {budget}", budget=budget) for budget in (64, 100)),
    Plan("prefill one after another, budget of 65", budget=65, mates=1),
    *(Plan(f"decode after a prompt of {prompt}", prompts=prompt) for prompt in (1, 63, 64, 65)),
    Plan("decode beside prefills", prompts=40, budget=72, mates=7),
)


def rows(checkpoint: Path, numerics: str) -> Iterator[Row]:
    """The rows of both compute dtypes; gradients, which take longest to compile, in bfloat16 alone."""
    for dtype in ("bfloat16", "float32"):
        model = from_pretrained(checkpoint, numerics=numerics, dtype=dtype)
        found = forward_rows(model)
        if dtype == "bfloat16":
            found = itertools.chain(found, gradient_rows(model))
        yield from (dataclasses.replace(row, name=f"{dtype} {row.name}") for row in found)


def forward_rows(model: Qwen35Moe, lengths: Sequence[int] = LENGTHS, plans: Sequence[Plan] = PLANS) -> Iterator[Row]:
    """Every way to score sequences, against the trainer's forward over micro-batches of 8."""
    sequences = draw(model, lengths)
    batch = _recut(as_batch(sequences), 8)
    whole = by_sequence(batch, score(model, batch).logprobs)
    yield from _trainer_rows(model, sequences, batch, whole)
    phases = Phases(model, sequences=MATES[-1] + 1, max_len=max(lengths))
    for plan in plans:
        steps = plan.steps([len(ids) - 1 for ids in sequences])
        yield Row.of(plan.name, "direct", phases.run(sequences, steps), whole)
    yield _truncated(phases, model, sequences)
    for mates in MATES:
        yield _beside(phases, sequences[-1][:140], whole[-1][:139], mates)


def gradient_rows(model: Qwen35Moe) -> Iterator[Row]:
    """The gradient and its forward, of micro-batches of 8 against smaller ones and remat."""
    batch = as_batch(draw(model, range(66, 120, 7)))
    whole = by_sequence(batch, score(model, batch).logprobs)
    grads, scores = policy_gradient(model, batch)
    yield Row.of("forward of the gradient", "direct", by_sequence(batch, scores.logprobs), whole)
    ways = [(f"micro-batches of {count}", _recut(batch, count), False) for count in (1, 2)] + [("remat", batch, True)]
    for name, other, remat in ways:
        found, again = policy_gradient(model, other, remat=remat)
        yield Row.of(f"gradient, {name}", "direct", nnx.to_pure_dict(found), nnx.to_pure_dict(grads), "gradients")
        yield Row.of(f"forward of the gradient, {name}", "direct", by_sequence(batch, again.logprobs), whole)


def draw(model: Qwen35Moe, lengths: Sequence[int], seed: int = 193) -> list[np.ndarray]:
    """Random tokens of a byte, which every vocabulary has."""
    rng = np.random.default_rng(seed)
    most = min(256, model.config.vocab_size)
    return [rng.integers(0, most, length, dtype=np.int32) for length in lengths]


def as_batch(sequences: Sequence[np.ndarray], sampling: Sampling = Sampling()) -> Batch:
    """A batch in which every token but the first counts as sampled."""
    samples = tuple(
        Sample(i, 0, ids[:1], ids[1:], np.zeros(len(ids) - 1, np.float32), np.zeros(len(ids) - 1, np.int32))
        for i, ids in enumerate(sequences)
    )
    advantages = np.linspace(-1, 1, len(samples), dtype=np.float32)[:, None]
    return pack_samples(samples, advantages, 1 << 30, sampling)


def by_sequence(batch: Batch, rows: np.ndarray) -> list[np.ndarray]:
    """The rows of every sequence that are there."""
    return [rows[batch.sequence_rows(s)][: sample.length - 1] for s, sample in enumerate(batch.samples)]


def _trainer_rows(model: Qwen35Moe, sequences: list[np.ndarray], batch: Batch, whole: list[np.ndarray]):
    for count in (1, 2):
        found = by_sequence(batch, score(model, _recut(batch, count)).logprobs)
        yield Row.of(f"trainer, micro-batches of {count}", "direct", found, whole)
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    longest = int(lengths.max())
    graphdef, state = nnx.split(model)
    jitted = jax.jit(
        lambda state, tokens, lengths, padding: logprobs(nnx.merge(graphdef, state), tokens, lengths, padding=padding),
        static_argnums=3,
    )
    for padding, width in (("right", longest), ("left", longest), ("right", longest + CHUNK), ("left", longest + 1)):
        tokens = np.zeros((len(sequences), width), np.int32)
        first = width - lengths if padding == "left" else np.zeros_like(lengths)
        for row, start, ids in zip(tokens, first, sequences, strict=True):
            row[start : start + len(ids)] = ids
        scores = np.asarray(jitted(state, jnp.asarray(tokens), jnp.asarray(lengths), padding))
        found = [row[start + 1 : start + n] for row, start, n in zip(scores, first, lengths, strict=True)]
        yield Row.of(f"trainer, not packed, {padding}-padded to {width}", "direct", found, whole)


def _beside(phases: Phases, last: np.ndarray, whole: np.ndarray, mates: int) -> Row:
    """One sequence decoded beside `mates` others that come and go."""
    rng = np.random.default_rng(mates)
    others = [rng.integers(0, 256, 8 + 5 * (i % 7), dtype=np.int32) for i in range(mates)]
    steps = Plan("", prompts=20, budget=mates + 40).steps([len(ids) - 1 for ids in (last, *others)])
    return Row.of(f"decode beside {mates} others", "direct", phases.run([last, *others], steps)[0], whole)


def _truncated(phases: Phases, model: Qwen35Moe, sequences: list[np.ndarray]) -> Row:
    """Scores in a distribution that leaves out about half of random tokens."""
    sampling = Sampling(temperature=4.0, top_k=200, top_p=0.99, min_p=1e-4)
    batch = as_batch(sequences, sampling)
    whole = by_sequence(batch, score(model, batch).logprobs)
    steps = Plan("", budget=100).steps([len(ids) - 1 for ids in sequences])
    return Row.of("truncated sampling", "direct", phases.run(sequences, steps, sampling), whole)


def _recut(batch: Batch, sequences: int) -> Batch:
    """The batch in micro-batches of so many sequences, all of one shape: one program."""
    micro_batches = cut(np.bincount(batch.sequence).tolist(), 1 << 30, batch.group, sequences)
    blocks = max(micro.blocks for micro in micro_batches)
    return dataclasses.replace(batch, micro_batches=tuple(dataclasses.replace(m, blocks=blocks) for m in micro_batches))
