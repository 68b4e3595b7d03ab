"""Rollouts as rows on the 64-token grid, in an order that no scheduler decides."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int32

from isojax.errors import SamplingError
from isojax.layouts import CHUNK, round_up
from isojax.samples import Request, Sample, read_samples
from isojax.sampling import Sampling

GRADIENT_GROUP = 8
"""Sequences whose gradients meet in one tree; the trees of a batch form a chain."""


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together: an aligned run of one gradient group.

    How a batch is cut into runs changes no bit of the gradient.

    Attributes:
        first: Index of the run's first sequence in the batch.
        count: Sequences of the run, a power of two; those past the end of the batch count as zero.
        rows: The run's rows of the batch.
        blocks: 64-row blocks that it is padded to, so that few shapes are compiled.
    """

    first: int
    count: int
    rows: slice
    blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch on the host: row r of a sequence's blocks is its position r and predicts position r + 1.

    Attributes:
        tokens: Token of each row; 0 where no token is.
        targets: The token that follows; 0 where none does.
        mask: Whether the target was sampled by the policy, hence compared and learned from.
        rollout_logprobs: Of the target, by the engine; 0 outside `mask`.
        advantages: Of the target's sample; 0 outside `mask`.
        reference_logprobs: Of the target, under a reference policy, if there is one.
        versions: Version of the weights that sampled the target; -1 outside `mask`.
        sequence: Sequence of each 64-row block.
        index: Which chunk of its sequence each block is.
        end: Number of rows of each block that hold a token.
        samples: The samples, in (prompt, sample) order; sequence s of the batch is samples[s].
        sampling: The distribution that the tokens were drawn from.
        micro_batches: How the rows go through the model.
        group: Sequences of a gradient group.
    """

    tokens: Int32[np.ndarray, " rows"]
    targets: Int32[np.ndarray, " rows"]
    mask: Bool[np.ndarray, " rows"]
    rollout_logprobs: Float[np.ndarray, " rows"]
    advantages: Float[np.ndarray, " rows"]
    versions: Int32[np.ndarray, " rows"]
    sequence: Int32[np.ndarray, " blocks"]
    index: Int32[np.ndarray, " blocks"]
    end: Int32[np.ndarray, " blocks"]
    samples: tuple[Sample, ...]
    sampling: Sampling
    micro_batches: tuple[MicroBatch, ...]
    group: int = GRADIENT_GROUP
    reference_logprobs: Float[np.ndarray, " rows"] | None = None

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of the whole batch: the normaliser of every loss, an integer known before backward."""
        return int(self.mask.sum())

    @property
    def positions(self) -> Int32[np.ndarray, " rows"]:
        """Position of each row's token in its sequence."""
        return (self.index[:, None] * CHUNK + np.arange(CHUNK, dtype=np.int32)).reshape(-1)

    def sequence_rows(self, sequence: int) -> slice:
        """The rows of one sequence, padding of its last block included."""
        blocks = np.flatnonzero(self.sequence == sequence)
        return slice(int(blocks[0]) * CHUNK, (int(blocks[-1]) + 1) * CHUNK)


def pack(
    outputs: Sequence[Request],
    advantages: Float[np.ndarray, "prompts samples"],
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    group: int = GRADIENT_GROUP,
    sequences: int | None = None,
) -> Batch:
    """Packs what an engine returned for one update.

    Every sequence starts at a multiple of 64 rows, in (prompt, sample) order. The last token of a
    sequence needs no row: nothing follows it.

    Args:
        outputs: One `vllm.RequestOutput` a prompt.
        advantages: One value a sample, spread over its tokens.
        max_tokens: Rows of a micro-batch at most: the trainer's memory, not its bits.
        sampling: The distribution that the tokens were drawn from; by default the one that
            `rollout_bridge.LLM` recorded with the outputs.
        group: Sequences of a gradient group, a power of two; part of the numerics.
        sequences: Sequences of a micro-batch, a power of two up to `group`; by default as many
            as `max_tokens` allows.

    Raises:
        SamplingError: If a sampled token has no finite log-probability, or the outputs were
            sampled in another way than `sampling` says.
        ValueError: If the shapes disagree or a sequence does not fit in `max_tokens`.
    """
    samples = tuple(read_samples(outputs))
    advantages = np.asarray(advantages, np.float32)
    counts = [len(output.outputs) for output in outputs]
    if advantages.ndim != 2 or counts != [advantages.shape[1]] * len(advantages):
        raise ValueError(f"pack got advantages {list(advantages.shape)} for {len(outputs)} prompts of {counts} samples")
    drawn_from = _sampling(outputs, sampling)
    return pack_samples(samples, advantages, max_tokens, drawn_from, group=group, sequences=sequences)


def pack_samples(
    samples: tuple[Sample, ...],
    advantages: Float[np.ndarray, "prompts samples"],
    max_tokens: int,
    sampling: Sampling,
    *,
    group: int = GRADIENT_GROUP,
    sequences: int | None = None,
) -> Batch:
    """Packs samples that were read before; arguments as `pack`."""
    if not samples:
        raise ValueError("pack got no outputs: there is nothing to learn from")
    blocks = [round_up(s.length - 1, CHUNK) // CHUNK for s in samples]
    total = sum(blocks) * CHUNK
    tokens, targets, versions = (np.full(total, fill, np.int32) for fill in (0, 0, -1))
    mask = np.zeros(total, bool)
    rollout_logprobs, spread = np.zeros(total, np.float32), np.zeros(total, np.float32)
    row = 0
    for sample, count in zip(samples, blocks, strict=True):
        ids = np.concatenate([sample.prompt_tokens, sample.tokens])
        sampled = slice(row + len(sample.prompt_tokens) - 1, row + len(ids) - 1)
        tokens[row : row + len(ids) - 1] = ids[:-1]
        targets[row : row + len(ids) - 1] = ids[1:]
        mask[sampled] = True
        rollout_logprobs[sampled] = sample.logprobs
        spread[sampled] = advantages[sample.prompt, sample.sample]
        versions[sampled] = sample.versions
        row += count * CHUNK
    return Batch(
        tokens=tokens,
        targets=targets,
        mask=mask,
        rollout_logprobs=rollout_logprobs,
        advantages=spread,
        versions=versions,
        sequence=np.repeat(np.arange(len(blocks), dtype=np.int32), blocks),
        index=np.concatenate([np.arange(n, dtype=np.int32) for n in blocks]),
        end=np.concatenate([_ends(s.length - 1, n) for s, n in zip(samples, blocks, strict=True)]),
        samples=samples,
        sampling=sampling,
        micro_batches=cut(blocks, max_tokens, group, sequences),
        group=group,
    )


def cut(blocks: Sequence[int], max_tokens: int, group: int, sequences: int | None = None) -> tuple[MicroBatch, ...]:
    """Cuts sequences of so many 64-row blocks into micro-batches of equally many sequences.

    Raises:
        ValueError: If a sequence alone exceeds `max_tokens`, or a count is no power of two.
    """
    for name, value in (("gradient group", group), ("sequences of a micro-batch", sequences)):
        if value is not None and (value < 1 or value & (value - 1) or value > group):
            raise ValueError(f"{name} is {value}: use a power of two up to the gradient group, {group}")
    longest = max(blocks) * CHUNK
    if longest > max_tokens:
        raise ValueError(f"a sequence takes {longest} rows and max_tokens is {max_tokens}: raise max_tokens")
    run = sequences or group
    while run > 1 and any(sum(blocks[i : i + run]) * CHUNK > max_tokens for i in range(0, len(blocks), run)):
        if sequences:
            raise ValueError(f"{run} sequences do not fit in max_tokens={max_tokens}: lower one or raise the other")
        run //= 2
    starts = np.concatenate([[0], np.cumsum(blocks)]) * CHUNK
    return tuple(
        MicroBatch(
            first=i,
            count=run,
            rows=slice(int(starts[i]), int(starts[min(i + run, len(blocks))])),
            blocks=bucket(sum(blocks[i : i + run])),
        )
        for i in range(0, len(blocks), run)
    )


def bucket(blocks: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, … that holds `blocks`: few shapes, at most half padding."""
    size = 1
    while size < blocks:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > 1 else round_up(size * 4 // 3, 2)
    return size


def _ends(length: int, blocks: int) -> np.ndarray:
    return np.clip(length - CHUNK * np.arange(blocks, dtype=np.int32), 0, CHUNK).astype(np.int32)


def _sampling(outputs: Sequence, asked: Sampling | None) -> Sampling:
    recorded = {Sampling.of(p) for o in outputs if (p := getattr(o, "sampling_params", None)) is not None}
    if asked is not None:
        recorded.add(asked)
    if len(recorded) > 1:
        kinds = "; ".join(sorted(map(str, recorded)))
        raise SamplingError(f"one batch holds tokens of different distributions ({kinds}): pack them apart")
    return recorded.pop() if recorded else Sampling()
