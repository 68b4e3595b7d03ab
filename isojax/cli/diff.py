"""Where two computations part: op, layer, token."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from isojax.bits import compare_bits
from isojax.errors import CheckpointError
from isojax.models import from_pretrained
from isojax.rl.checkpoint import load_params
from isojax.rl.config import Config
from isojax.rl.metrics import read_metrics
from isojax.rl.parity import Mismatch
from isojax.sampling import Sampling
from isojax.verify.direct import draw
from isojax.verify.trace import Difference, explain, trainer_trace
from qwen35_moe import Qwen35Moe

_TIMES = ("seconds", "tokens_per_s")
_AFTER_FORWARD = (
    "grad_norm",
    "weights_digest",
)  # Where these are the first to differ, all that a forward gives agrees.
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
    """The first step at which two runs part, and what parts them there: settings, weights, an op.

    Raises:
        CheckpointError: If one is no run, or they have no step in common.
    """
    runs = (first, second)
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise CheckpointError(f"{run} is no run: it has no metrics.jsonl")
    rows = [{row["step"]: row for row in read_metrics(run)} for run in runs]
    common = sorted(rows[0].keys() & rows[1].keys())
    if not common:
        raise CheckpointError(f"{first} and {second} have no step in common: nothing can be compared")
    parted = next(((s, key) for s in common if (key := _first_column(rows[0][s], rows[1][s]))), None)
    if parted is None:
        equal = f"{len(common)} common steps have equal metrics, weights and contract"
        longer = [f"; {run} goes on to step {max(r)}" for run, r in zip(runs, rows, strict=True) if max(r) > common[-1]]
        return Diff(False, (equal + "".join(longer),), {"steps": len(common)})
    step, key = parted
    values = [rows[i][step].get(key) for i in range(2)]
    lines = [f"step {step} is the first that differs: {key} {values[0]} and {values[1]}"]
    facts: dict[str, Any] = {"step": step, "metric": key}
    saved = sorted(set(_checkpoints(first)) & set(_checkpoints(second)))
    if not saved:
        lines.append("no common checkpoint: lower run.checkpoint_every to find settings, weights and op")
        return Diff(True, tuple(lines), facts)
    facts["settings"] = _settings(*(load_params(run / f"step_{saved[0]}")[1]["config"] for run in runs))
    lines += [f"settings: {name} {one!r} and {two!r}" for name, (one, two) in facts["settings"].items()]
    before = max((s for s in saved if s < step), default=0)
    for at in (before, step) if step in saved else (before,):
        models = [policy_of(run / f"step_{at or saved[0]}", start=at == 0)[0] for run in runs]
        found = compare_bits(models[0].params(), models[1].params())
        facts |= {"checkpoint": at, "parameters": found.to_json()}
        if found.first is not None:
            where = f"{found.first.leaf}{list(found.first.index)}"
            lines.append(f"weights after step {at} differ first in {where}: {found.different:,} of {found.compared:,}")
            break
        lines.append(f"weights after step {at} are equal")
        if at == before and key not in _AFTER_FORWARD:
            op = _first_op(*models)
            facts["op"] = op and dataclasses.asdict(op)
            lines.append(f"from them, first differing op: {op or 'none, in the forward'}")
    return Diff(True, tuple(lines), facts)


def _first_column(one: dict[str, Any], two: dict[str, Any]) -> str | None:
    """The first column that differs and is no time; the contract comes first, since it explains all others."""
    columns = ["contract_digest", *(key for key in one | two if key not in _TIMES)]
    return next((key for key in columns if json.dumps(one.get(key)) != json.dumps(two.get(key))), None)


def _settings(one: dict[str, Any], two: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What was configured differently and is not about where a run writes."""
    sections = [(s, key) for s in one | two if s != "run" for key in one.get(s, {}) | two.get(s, {})]
    pairs = {f"{s}.{key}": (one.get(s, {}).get(key), two.get(s, {}).get(key)) for s, key in sections}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _first_op(one: Qwen35Moe, two: Qwen35Moe) -> Difference | None:
    """The first op at which the forwards of two models of equal weights part."""
    probe = draw(one, [_PROBE])[0]
    traces = [trainer_trace(model, probe, Sampling())[0] for model in (one, two)]
    return traces[0].first_difference(traces[1])


def policy_of(checkpoint: Path, *, start: bool = False) -> tuple[Qwen35Moe, Config]:
    """The policy of `RUN/step_N`, with the numerics of its run, and the run's configuration.

    Args:
        checkpoint: `RUN/step_N`.
        start: Whether to take the weights that the run started from instead.
    """
    params, notes = load_params(checkpoint)
    config = Config.model_validate(notes["config"])
    policy = config.policy
    source = from_pretrained(policy.checkpoint, numerics=policy.numerics, dtype=policy.dtype)
    if start:
        return source, config
    model = Qwen35Moe(source.config, params, source.ops)
    model.folder = source.folder
    return model, config


def _checkpoints(run: Path) -> list[int]:
    found = (re.fullmatch(r"step_(\d+)", path.name) for path in run.iterdir())
    return sorted(int(name[1]) for name in found if name)
