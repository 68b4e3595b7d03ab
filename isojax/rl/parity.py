"""The check that stands between a forward and its update: every on-policy log-probability, bit for bit."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int32

from isojax.errors import MismatchError, WeightsError
from isojax.rl.packing import Batch
from isojax.samples import Sample
from isojax.sampling import Sampling

_MOST_SEQUENCES = 8  # Saved of a mismatch; one is enough to reproduce it.


@dataclasses.dataclass(frozen=True, slots=True)
class Parity:
    """What was compared, and what it showed.

    Attributes:
        compared: On-policy log-probabilities.
        different: Those whose bits differ.
        off_policy: Log-probabilities that were not compared: other weights sampled their tokens.
        ratio_max_abs_minus_1: Largest |π_trainer/π_rollout − 1| over all of them.
        kl: Mean of rollout less trainer over the compared, in nats: the k1 estimate of the divergence.
        by_position: For each output position, how many were compared and how many differ.
    """

    compared: int
    different: int
    off_policy: int
    ratio_max_abs_minus_1: float
    kl: float
    by_position: tuple[Int32[np.ndarray, " positions"], Int32[np.ndarray, " positions"]]

    def __str__(self) -> str:
        text = f"{self.compared:,} compared, {self.different:,} different"
        return text + (f", {self.off_policy:,} off-policy" if self.off_policy else "")


def compare(batch: Batch, logprobs: Float[np.ndarray, " rows"], *, weights_version: int | None = None) -> Parity:
    """Compares without judging. Arguments as `check_parity`."""
    return _compare(batch, logprobs, weights_version)[0]


def check_parity(
    batch: Batch,
    logprobs: Float[np.ndarray, " rows"],
    *,
    weights_version: int | None = None,
    directory: Path = Path("runs"),
    step: int = 0,
    explain: "Callable[[Mismatch], str] | None" = None,
) -> Parity:
    """Compares the loss's own log-probabilities with the rollout's, before anything is updated.

    Tokens that other weights sampled are counted as off-policy, not compared.

    Args:
        batch: From `pack`.
        logprobs: From `policy_gradient`, of every row of the batch.
        weights_version: The trainer's; by default the newest in the batch.
        directory: Of the run; takes the mismatch file.
        step: Number of the update, for the file's name.
        explain: Finds the first differing op, e.g. `isojax.replay.explainer(model)`.

    Raises:
        MismatchError: If a bit differs. The sequences are saved, `isojax diff` reproduces them.
        WeightsError: If no token was sampled with the trainer's weights.
    """
    parity, different = _compare(batch, logprobs, weights_version)
    if not parity.compared:
        found = ", ".join(f"v{version}" for version in sorted(set(batch.versions[batch.mask].tolist())))
        raise WeightsError(
            f"the trainer has v{weights_version}, the whole batch was sampled with {found}: generate it again; a check"
            " that compares nothing has shown nothing"
        )
    if not parity.different:
        return parity
    mismatch = Mismatch.of(batch, logprobs, different)
    lines = [
        f"{parity.different:,} of {parity.compared:,} log-probabilities differ; no update was applied.",
        str(mismatch),
    ]
    if explain is not None:
        lines.append(explain(mismatch))
    path = mismatch.save(Path(directory) / f"mismatch_{step:04d}.npz")
    lines.append(f"reproduce: isojax diff {path}")
    raise MismatchError("\n  ".join(lines))


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """Sequences of which a log-probability differed: what `isojax diff` needs beside the weights.

    Attributes:
        samples: The sequences, as sampled.
        trainer: The trainer's log-probabilities of each one's sampled tokens.
        sampling: The distribution they were drawn from.
    """

    samples: tuple[Sample, ...]
    trainer: tuple[Float[np.ndarray, " sampled"], ...]
    sampling: Sampling

    @classmethod
    def of(cls, batch: Batch, logprobs: np.ndarray, different: Bool[np.ndarray, " rows"]) -> "Mismatch":
        """The sequences of `batch` with a row in `different`, the first few."""
        blocks = np.flatnonzero(different.reshape(-1, different.size // batch.sequence.size).any(1))
        numbers = sorted({int(batch.sequence[b]) for b in blocks})[:_MOST_SEQUENCES]
        rows = [batch.sequence_rows(s) for s in numbers]
        return cls(
            samples=tuple(batch.samples[s] for s in numbers),
            trainer=tuple(logprobs[r][batch.mask[r]] for r in rows),
            sampling=batch.sampling,
        )

    @property
    def first(self) -> tuple[Sample, int]:
        """The first sequence, and the first of its sampled tokens that differs."""
        sample = self.samples[0]
        return sample, int(np.flatnonzero(_bits(sample.logprobs) != _bits(self.trainer[0]))[0])

    def __str__(self) -> str:
        sample, output = self.first
        pair = (("rollout", sample.logprobs[output]), ("trainer", self.trainer[0][output]))
        values = ", ".join(f"{side} {value:.8f} ({int(_bits(value)):08x})" for side, value in pair)
        return (
            f"request {sample.prompt}, sample {sample.sample}, position {len(sample.prompt_tokens) + output}"
            f" (token {sample.tokens[output]}): {values}"
        )

    def save(self, path: Path) -> Path:
        """Writes an `.npz` that holds everything but the weights."""
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {"sampling": np.array(json.dumps(dataclasses.asdict(self.sampling)))}
        for i, (sample, trainer) in enumerate(zip(self.samples, self.trainer, strict=True)):
            arrays |= {f"{i}.{k}": np.asarray(v) for k, v in _fields(sample).items()} | {f"{i}.trainer": trainer}
        np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
        return path

    @classmethod
    def load(cls, path: Path) -> "Mismatch":
        """Reads what `save` wrote."""
        with np.load(path) as file:
            arrays = dict(file)
        samples, trainer = [], []
        while f"{len(samples)}.trainer" in arrays:
            prefix = f"{len(samples)}."
            trainer.append(arrays[f"{prefix}trainer"])
            values = {f.name: arrays[prefix + f.name] for f in dataclasses.fields(Sample)}
            samples.append(Sample(**{k: v if v.ndim else int(v) for k, v in values.items()}))
        return cls(tuple(samples), tuple(trainer), Sampling(**json.loads(str(arrays["sampling"]))))


def _compare(batch: Batch, logprobs: np.ndarray, version: int | None) -> tuple[Parity, np.ndarray]:
    """The result, and which rows differ."""
    newest = int(batch.versions.max()) if version is None else version
    on_policy = batch.mask & (batch.versions == newest)
    different = on_policy & (_bits(logprobs) != _bits(batch.rollout_logprobs))
    rollout, trainer = (x[on_policy].astype(np.float64) for x in (batch.rollout_logprobs, logprobs))
    outputs = np.concatenate([np.arange(len(s.tokens)) for s in batch.samples])
    length = int(outputs.max()) + 1
    counts = (np.bincount(outputs[rows[batch.mask]], minlength=length) for rows in (on_policy, different))
    compared, differing = (count.astype(np.int32) for count in counts)
    parity = Parity(
        compared=int(on_policy.sum()),
        different=int(different.sum()),
        off_policy=int((batch.mask & ~on_policy).sum()),
        ratio_max_abs_minus_1=float(np.abs(np.expm1(trainer - rollout)).max(initial=0.0)),
        kl=float((rollout - trainer).mean()) if rollout.size else 0.0,
        by_position=(compared, differing),
    )
    return parity, different


def _bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def _fields(sample: Sample) -> dict[str, object]:
    return {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
