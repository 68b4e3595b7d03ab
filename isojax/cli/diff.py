"""Where two computations part: op, layer, token."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from isojax.bits import compare_bits
from isojax.errors import CheckpointError
from isojax.models import from_pretrained
from isojax.rl.checkpoint import load_params
from isojax.rl.config import Config
from isojax.rl.parity import Mismatch
from isojax.rl.report import read_metrics
from isojax.sampling import Sampling
from isojax.verify.direct import draw
from isojax.verify.trace import explain, trainer_trace
from qwen35_moe import Qwen35Moe

_BITS = ("reward_mean", "logprobs_compared", "logprobs_different", "entropy", "loss", "grad_norm", "weights_digest")
_PROBE = 150  # Tokens: over two chunk borders.


@dataclasses.dataclass(frozen=True, slots=True)
class Diff:
    """What a comparison showed; `str` gives its lines."""

    differs: bool
    lines: tuple[str, ...]
    facts: dict[str, Any]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> dict[str, Any]:
        return {"differs": self.differs, "lines": list(self.lines)} | self.facts


def diff_file(path: Path, checkpoint: Path | None = None) -> Diff:
    """Replays a mismatch file.

    Args:
        path: `RUN/mismatch_N.npz`.
        checkpoint: A Hugging Face folder with the weights; by default `RUN/step_N`, which the run saved with it.

    Raises:
        CheckpointError: If the file or its weights are not there.
    """
    if not path.is_file():
        raise CheckpointError(f"no mismatch file {path}")
    mismatch = Mismatch.load(path)
    if checkpoint is not None:
        model = from_pretrained(checkpoint)
    else:
        step = re.fullmatch(r"mismatch_(\d+)\.npz", path.name)
        if step is None:
            raise CheckpointError(f"{path.name} does not name its step: pass --checkpoint with the weights")
        model, _ = policy_of(path.parent / f"step_{int(step[1])}")
    found = explain(model, mismatch)
    return Diff(True, (str(mismatch), str(found)), dataclasses.asdict(found))


def diff_runs(first: Path, second: Path) -> Diff:
    """The first step at which two runs part, and the first op that parts them there.

    Raises:
        CheckpointError: If one is no run.
    """
    runs = (first, second)
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise CheckpointError(f"{run} is no run: it has no metrics.jsonl")
    rows = [{row["step"]: row for row in read_metrics(run)} for run in runs]
    common = sorted(rows[0].keys() & rows[1].keys())
    parted = next(((s, k) for s in common for k in (*_BITS, "contract_digest") if rows[0][s][k] != rows[1][s][k]), None)
    if parted is None:
        equal = f"{len(common)} common steps have equal metrics, weights and contract"
        return Diff(False, (equal,), {"steps": len(common)})
    step, key = parted
    lines = [f"step {step} is the first that differs: {key} {rows[0][step][key]} and {rows[1][step][key]}"]
    facts: dict[str, Any] = {"step": step, "metric": key}
    saved = [s for s in _checkpoints(first) if s in _checkpoints(second) and s < step]
    if not saved:
        lines.append("no common checkpoint before it: lower run.checkpoint_every to find the op")
        return Diff(True, tuple(lines), facts)
    models = [policy_of(run / f"step_{saved[-1]}")[0] for run in runs]
    found = compare_bits(models[0].params(), models[1].params())
    facts |= {"checkpoint": saved[-1], "parameters": found.to_json()}
    if found.first is not None:
        lines.append(
            f"step_{saved[-1]} holds other weights already, first in {found.first.leaf}{list(found.first.index)}"
        )
        return Diff(True, tuple(lines), facts)
    probe = draw(models[0], [_PROBE])[0]
    traces = [trainer_trace(model, probe, Sampling())[0] for model in models]
    op = traces[0].first_difference(traces[1])
    lines.append(
        f"from the weights of step_{saved[-1]}, which are equal: first differing op: {op or 'none, in the forward'}"
    )
    return Diff(True, tuple(lines), facts | {"op": op and dataclasses.asdict(op)})


def policy_of(checkpoint: Path) -> tuple[Qwen35Moe, Config]:
    """The policy of `RUN/step_N`, with the numerics of its run, and the run's configuration."""
    params, notes = load_params(checkpoint)
    config = Config.model_validate(notes["config"])
    policy = config.policy
    source = from_pretrained(policy.checkpoint, numerics=policy.numerics, dtype=policy.dtype)
    model = Qwen35Moe(source.config, params, source.ops)
    model.folder = source.folder
    return model, config


def _checkpoints(run: Path) -> list[int]:
    found = (re.fullmatch(r"step_(\d+)", path.name) for path in run.iterdir())
    return sorted(int(name[1]) for name in found if name)
