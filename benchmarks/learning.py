"""Does the policy learn? Pass rate on fixed held-out items before and after GRPO, exact and native, on several seeds.

python benchmarks/learning.py [--json benchmarks/learning.json] [KEY=VALUE…]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isojax.cli.train import DEMO, connect
from isojax.rl.config import Config, load
from isojax.rl.trainer import Engine, Summary, Trainer, seeds_of

SEEDS = (0, 1, 2)
STEPS = 24  # As the demo.
HELD_OUT_SEED = 2026  # Other items than those that the demo's settings were chosen on.


def pass_rate(engine: Engine, config: Config) -> float:
    """Share of correct answers to the held-out items, every sample of each counted; the same seeds each time."""
    task = config.task.build_held_out()
    seeds = seeds_of(config.task.held_out_seed, 0, len(task.items))
    outputs = engine.rollout([task.prompt(item) for item in task.items], seeds)
    pairs = zip(task.items, outputs, strict=True)
    return statistics.fmean(task.verify(c.text, item) for item, output in pairs for c in output.outputs)


def learn(seed: int, numerics: str, overrides: Sequence[str]) -> dict[str, Any]:
    """One run, and its pass rates."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"policy.numerics={numerics}", f"train.seed={seed}", f"run.directory={folder}/run"]
        settings += [f"train.steps={STEPS}", f"task.held_out_seed={HELD_OUT_SEED}", "run.checkpoint_every=100000"]
        config = load(DEMO, [*settings, *overrides])
        start = time.perf_counter()
        trainer = Trainer(config, connect)
        before = pass_rate(trainer.engine, config)
        rows = []
        for row in trainer.run():
            rows.append(row)
            print(f"{numerics} seed {seed} step {row['step']} reward {row['reward_mean']:.3f}", file=sys.stderr)
        after = pass_rate(trainer.engine, config)
        trainer.engine.close()
    summary = Summary.of(rows)
    return {
        "seed": seed,
        "numerics": numerics,
        "before": before,
        "after": after,
        "steps": summary.steps,
        "logprobs_compared": summary.compared,
        "logprobs_different": summary.different,
        "seconds": round(time.perf_counter() - start, 1),
        "reward_mean": [row["reward_mean"] for row in rows],
        "weights_digest": rows[-1]["weights_digest"],
    }


def mean_pass_rates(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Over the seeds of each numerics."""
    return {
        numerics: {
            when: statistics.fmean(run[when] for run in runs if run["numerics"] == numerics)
            for when in ("before", "after")
        }
        for numerics in dict.fromkeys(run["numerics"] for run in runs)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    items = load(DEMO, args.overrides).task.held_out
    runs: list[dict[str, Any]] = []
    for numerics in ("exact", "native"):
        for seed in SEEDS:
            runs.append(learn(seed, numerics, args.overrides))
            means = mean_pass_rates(runs)
            result = {"held_out_items": items, "mean_pass_rate": means, "runs": runs}
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    means = mean_pass_rates(runs)
    for numerics, mean in means.items():
        print(
            f"{numerics}: pass rate {mean['before']:.3f} before, {mean['after']:.3f} after, mean of {len(SEEDS)} seeds"
        )
    if means["exact"]["after"] <= means["exact"]["before"]:
        sys.exit("the mean pass rate did not rise")


if __name__ == "__main__":
    main()
