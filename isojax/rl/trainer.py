"""The loop: roll out, grade, one forward and backward, the check, the update, the new weights in the engine."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flax import nnx

from isojax import optim
from isojax.bits import digest
from isojax.errors import CheckpointError, MismatchError
from isojax.models import from_pretrained
from isojax.rl.advantages import group_advantages
from isojax.rl.checkpoint import Checkpoints
from isojax.rl.config import Config
from isojax.rl.gradient import Scores, policy_gradient, score
from isojax.rl.losses import grpo_loss
from isojax.rl.metrics import read_metrics
from isojax.rl.packing import Batch, pack
from isojax.rl.parity import Mismatch, Parity, check_parity, compare
from isojax.rl.tasks import Item, Task
from isojax.samples import Request
from qwen35_moe import Qwen35Moe, identity


@runtime_checkable
class Engine(Protocol):
    """A rollout engine, as the trainer needs it."""

    @property
    def weights_version(self) -> int:
        """Version of the weights that the next rollout is sampled from."""
        ...

    def rollout(self, prompts: Sequence[str], seeds: Sequence[int]) -> Sequence[Request]:
        """Completions of every prompt; a prompt's depend on its seed and the weights alone."""
        ...

    def update_weights(self, model: Qwen35Moe) -> None:
        """Exchanges all weights, or raises and keeps the old ones."""
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...


type Connect = Callable[[Qwen35Moe, Config], Engine]
type Explain = Callable[[Qwen35Moe, Mismatch], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a run did; `str` gives its closing line."""

    steps: int
    compared: int
    different: int
    ratio_max_abs_minus_1: float

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> "Summary":
        """The summary of a run's metrics."""
        return cls(
            steps=len(rows),
            compared=sum(row["logprobs_compared"] for row in rows),
            different=sum(row["logprobs_different"] for row in rows),
            ratio_max_abs_minus_1=max((row["ratio_max_abs_minus_1"] for row in rows), default=0.0),
        )

    def __str__(self) -> str:
        return (
            f"logprobs compared: {self.compared}, different: {self.different}, steps: {self.steps},"
            f" max |ratio - 1|: {self.ratio_max_abs_minus_1}"
        )


class Trainer:
    """One run: its policy, its engine, and what it writes to its directory.

    With numerics exact a differing log-probability stops the run before its update; with native
    it is counted and the run goes on.
    """

    def __init__(self, config: Config, connect: Connect, *, resume: bool = False, explain: Explain | None = None):
        self.config, self.directory, self._explain = config, config.run.directory, explain
        self.task: Task = config.task.build()
        self.model = from_pretrained(
            config.policy.checkpoint, numerics=config.policy.numerics, dtype=config.policy.dtype
        )
        reference = config.loss.kl > 0
        self._reference = nnx.clone(self.model) if reference else None
        settings = config.optimizer.model_dump(exclude={"lr"})
        self.optimizer = nnx.Optimizer(self.model, optim.adamw(config.optimizer.lr, **settings), wrt=nnx.Param)
        self._checkpoints = Checkpoints(self.directory)
        self.step, self._positions = 0, _Positions.empty(config.sampling.max_tokens)
        if resume:
            self._restore()
        elif self._checkpoints.latest is not None:
            raise CheckpointError(
                f"{self.directory} holds a run: pass --resume to continue it, or another run.directory"
            )
        self._keep_metrics()
        self._base_version = self.step
        self.engine = connect(self.model, config)

    @property
    def weights_version(self) -> int:
        """Updates that made the weights, over all sittings of the run."""
        return self._base_version + self.engine.weights_version

    def run(self) -> Iterator[dict[str, Any]]:
        """Makes the steps that are left, and yields the metrics of each."""
        while self.step < self.config.train.steps:
            row = self._one_step()
            with (self.directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._positions.save(self.directory / "positions.json")
            if self.step % self.config.run.checkpoint_every == 0 or self.step == self.config.train.steps:
                self._save()
            yield row

    def _one_step(self) -> dict[str, Any]:
        seconds: dict[str, float] = {}
        with _timed(seconds, "rollout"):
            batch, rewards = rollout(self.engine, self.task, self.config, self.step)
            if self._reference is not None:
                reference = score(self._reference, batch).logprobs
                batch = dataclasses.replace(batch, reference_logprobs=reference)
        with _timed(seconds, "train"):
            grads, scores = policy_gradient(self.model, batch, self._loss(), remat=self.config.train.remat)
        with _timed(seconds, "check"):
            try:
                parity = self._check(batch, scores)
            except MismatchError:
                if self._checkpoints.latest != self.step:
                    self._save()  # The weights that differed, for `isojax diff`.
                raise
            self._positions.add(parity)
        with _timed(seconds, "train"):
            norm = float(optim.global_norm(grads))
            self.optimizer.update(self.model, grads)
        version = self.weights_version
        with _timed(seconds, "weight_update"):
            self.engine.update_weights(self.model)
            weights = digest(self.model.params())
        self.step += 1
        return {
            "step": self.step,
            "reward_mean": float(rewards.mean()),
            "logprobs_compared": parity.compared,
            "logprobs_different": parity.different,
            "ratio_max_abs_minus_1": parity.ratio_max_abs_minus_1,
            "kl": parity.kl,
            "entropy": float(scores.entropy[batch.mask].mean(dtype=np.float64)),
            "loss": scores.loss,
            "grad_norm": norm,
            "tokens_per_s": batch.num_tokens / sum(seconds.values()),
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "weights_version": version,
            "weights_digest": weights,
            "contract_digest": self.contract_digest,
        }

    @functools.cached_property
    def contract_digest(self) -> str:
        """Fingerprint of the numerics that trainer and engine share."""
        return identity(self.model.config, self.model.ops).digest

    def _loss(self):
        loss = self.config.loss
        return functools.partial(
            grpo_loss, clip=loss.clip, clip_high=loss.clip_high, kl=loss.kl, entropy_bonus=loss.entropy_bonus
        )

    def _check(self, batch: Batch, scores: Scores) -> Parity:
        version = self.engine.weights_version
        if self.config.policy.numerics == "native":
            return compare(batch, scores.logprobs, weights_version=version)
        explain = None if self._explain is None else functools.partial(self._explain, self.model)
        return check_parity(
            batch,
            scores.logprobs,
            weights_version=version,
            directory=self.directory,
            step=self.step,
            explain=explain,
        )

    def _state(self) -> dict[str, Any]:
        return {"params": self.model.params(), "optimizer": nnx.to_pure_dict(nnx.state(self.optimizer, nnx.OptState))}

    def _save(self) -> None:
        notes = {
            "step": self.step,
            "positions": self._positions.to_json(),
            "config": self.config.model_dump(mode="json"),
        }
        self._checkpoints.save(self.step, self._state(), notes)

    def _restore(self) -> None:
        state, notes = self._checkpoints.restore(self._state())
        nnx.update(self.model.weights, _like(nnx.state(self.model.weights, nnx.Param), state["params"]))
        nnx.update(self.optimizer, _like(nnx.state(self.optimizer, nnx.OptState), state["optimizer"]))
        self.step, self._positions = notes["step"], _Positions.from_json(notes["positions"])

    def _keep_metrics(self) -> None:
        """Leaves the rows of the steps that the weights at hand have seen, and no other."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "metrics.jsonl"
        rows = [row for row in read_metrics(self.directory) if row["step"] <= self.step] if path.exists() else []
        whole = path.with_suffix(".partial")  # Renamed, so that a crash loses no row.
        whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
        whole.replace(path)


def rollout(engine: Engine, task: Task, config: Config, step: int) -> tuple[Batch, np.ndarray]:
    """Samples, grades and packs the items of a step: the batch to learn from, and the reward of every sample."""
    items = items_of(task, config, step)
    seeds = seeds_of(config.train.seed, step, len(items))
    outputs = engine.rollout([task.prompt(item) for item in items], seeds)
    rewards = np.array(
        [[task.verify(c.text, item) for c in output.outputs] for output, item in zip(outputs, items, strict=True)],
        np.float32,
    )
    advantages = group_advantages(rewards, scale=config.loss.scale_advantages)
    train = config.train
    batch = pack(outputs, advantages, train.max_tokens, group=train.gradient_group, sequences=train.sequences)
    return batch, rewards


def items_of(task: Task, config: Config, step: int) -> list[Item]:
    """The items of a step: a function of the seed and the step alone."""
    rng = np.random.default_rng([config.train.seed, step])
    return [task.items[i] for i in rng.integers(len(task.items), size=config.train.prompts)]


def seeds_of(seed: int, step: int, count: int) -> list[int]:
    """One 31-bit seed for every prompt of a step: a function of the three numbers alone."""
    return np.random.default_rng([seed, step, 1]).integers(1 << 31, size=count).tolist()


@dataclasses.dataclass
class _Positions:
    """Comparisons and differences at every output position, over a run."""

    compared: np.ndarray
    different: np.ndarray

    @classmethod
    def empty(cls, length: int) -> "_Positions":
        return cls(np.zeros(length, np.int64), np.zeros(length, np.int64))

    def add(self, parity: Parity) -> None:
        for total, counts in zip((self.compared, self.different), parity.by_position, strict=True):
            total[: len(counts)] += counts

    def to_json(self) -> dict[str, list[int]]:
        return {"compared": self.compared.tolist(), "different": self.different.tolist()}

    @classmethod
    def from_json(cls, value: dict[str, list[int]]) -> "_Positions":
        return cls(np.array(value["compared"]), np.array(value["different"]))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json()))


def _like(state: nnx.State, values: Any) -> nnx.State:
    """`values` in the structure of `state`."""
    nnx.replace_by_pure_dict(state, values)
    return state


@contextmanager
def _timed(seconds: dict[str, float], name: str):
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
