"""`isojax train` and the demo: a `Trainer` with vLLM's engine, progress for people, the closing line."""

import contextlib
import dataclasses
import json as jsonlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isojax.cli.output import closing, note, write_json
from isojax.errors import ConfigError
from isojax.rl.config import Config, load

_ROOT = Path(__file__).parents[2]
DEMO = _ROOT / "configs" / "demo.toml"


def train(path: Path, overrides: Sequence[str], *, dry_run: bool, resume: bool, json: Path | None) -> None:
    """Runs a configuration to its end, or with `dry_run` says what it would do."""
    config = load(path, overrides)
    if dry_run:
        lines = plan(config)
        write_json(json, {"plan": lines, "config": config.model_dump(mode="json")})
        for line in lines:
            note(line)
        closing(f"{path}: ready, nothing was trained")
        return
    summary = run(config, resume=resume)
    write_json(json, dataclasses.asdict(summary))
    closing(str(summary))


def demo(overrides: Sequence[str], *, json: Path | None) -> None:
    """The demo: a fresh run of the small policy each time."""
    if not DEMO.is_file():
        raise ConfigError(f"the demo needs a checkout of the repository: there is no {DEMO}")
    config = load(DEMO, overrides)
    if config.run.directory.exists():
        shutil.rmtree(config.run.directory)
    summary = run(config)
    write_json(json, dataclasses.asdict(summary))
    closing(str(summary))


def run(config: Config, *, resume: bool = False):
    """Trains, showing a line a step on stderr; returns the summary and leaves the report."""
    from isojax.rl.metrics import read_metrics
    from isojax.rl.report import write_report
    from isojax.rl.trainer import Summary, Trainer
    from isojax.verify.trace import explain

    def explained(model, mismatch):
        from rollout_bridge.rollouts import Rollouts

        found, (sample, _) = explain(model, mismatch), mismatch.first
        if found.difference is not None or not isinstance(trainer.engine, Rollouts):
            return str(found)
        return f"{found}\n  {trainer.engine.diagnose(model, sample, mismatch.trainer[0], mismatch.sampling)}"

    start = time.perf_counter()
    for line in plan(config):
        note(line)
    trainer = Trainer(config, connect, resume=resume, explain=explained)
    note(f"engine ready after {time.perf_counter() - start:.0f} s")
    with contextlib.closing(trainer.engine):
        for row in trainer.run():
            note(
                f"step {row['step']:>4}/{config.train.steps}  reward {row['reward_mean']:.3f}"
                f"  {row['logprobs_compared']:,} compared, {row['logprobs_different']:,} different"
                f"  entropy {row['entropy']:.3f}  {sum(row['seconds'].values()):.1f} s"
            )
    directory = config.run.directory
    summary = Summary.of(read_metrics(directory))
    contrast = _contrast(config) if config.run.contrast else None
    report = write_report(directory, f"isojax: {directory.name}", str(summary), contrast)
    note(f"report: {report}")
    return summary


def connect(model: Any, config: Config):
    """vLLM's engine beside the policy."""
    # vLLM's log belongs to the person who waits, not into the result.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from rollout_bridge.rollouts import Rollouts

    engine = config.engine.model_dump(exclude_none=True)
    sampling = {k: v for k, v in config.sampling.model_dump().items() if v not in (None, [])}
    return Rollouts(model, engine, sampling, chat=config.task.chat)


def plan(config: Config) -> list[str]:
    """What a run would do, in words; reads the checkpoint's config and the task, no weights."""
    from qwen35_moe import Config as ModelConfig
    from qwen35_moe.checkpoint import num_parameters

    policy, train, sampling = config.policy, config.train, config.sampling
    parameters = num_parameters(ModelConfig.from_hf(policy.checkpoint, compute_dtype=policy.dtype))
    items = len(config.task.build().items)
    promise = "log-probabilities compared before every update" if policy.numerics == "exact" else "NOTHING IS PROMISED"
    name = config.task.reasoning_gym or str(config.task.jsonl)
    return [
        f"policy    {policy.checkpoint}, {parameters:,} parameters, {policy.dtype}",
        f"numerics  {policy.numerics}: {promise}",
        f"task      {name}, {items:,} items",
        f"rollouts  {train.prompts} prompts, {sampling.n} samples of at most {sampling.max_tokens} tokens,"
        f" temperature {sampling.temperature}",
        f"training  {train.steps} steps, learning rate {config.optimizer.lr}, clip {config.loss.clip},"
        f" gradient groups of {train.gradient_group} sequences",
        f"run       {config.run.directory}, a checkpoint every {config.run.checkpoint_every} steps",
    ]


def _contrast(config: Config) -> dict[str, Any]:
    """The first step's prompts with numerics native: what the exact mode removes."""
    from isojax.models import from_pretrained
    from isojax.rl.gradient import score
    from isojax.rl.parity import compare
    from isojax.rl.trainer import rollout

    note("contrast: the same prompts with numerics native")
    model = from_pretrained(config.policy.checkpoint, numerics="native", dtype=config.policy.dtype)
    engine = connect(model, config)
    batch, _ = rollout(engine, config.task.build(), config, step=0)
    found = compare(batch, score(model, batch).logprobs)
    engine.close()
    compared, different = found.by_position
    contrast = {
        "compared": found.compared,
        "different": found.different,
        "max_abs": found.ratio_max_abs_minus_1,
        "by_position": [float(d / c) if c else 0.0 for c, d in zip(compared, different, strict=True)],
    }
    (config.run.directory / "contrast.json").write_text(jsonlib.dumps(contrast))
    return contrast
