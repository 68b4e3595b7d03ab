"""Real runs of a small policy: vLLM's engine in this process, three steps with a checkpoint each."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

CONFIG = """
[policy]
checkpoint = "{folder}/policy"
[task]
jsonl = "{folder}/questions.jsonl"
reward = "tests.isojax.cli.runs:reward"
[sampling]
n = 2
max_tokens = 6
[engine]
max_model_len = 64
max_num_seqs = 6
max_num_batched_tokens = 64
kv_cache_memory_bytes = 4_194_304
[optimizer]
lr = 1e-3
[train]
steps = 3
prompts = 3
[run]
directory = "{folder}/whole"
checkpoint_every = 1
"""

TIMES = ("tokens_per_s", "seconds")


def reward(text: str, row: dict[str, Any]) -> float:
    """Of bytes drawn at random, so that samples of one prompt differ in it."""
    return sum(text.encode()) % 7 / 7


@dataclasses.dataclass(frozen=True)
class Run:
    """A command that trained: how it ended, what it left, and the token ids of each of its rollouts."""

    directory: Path
    code: int
    out: str
    err: str
    drawn: list[list[list[int]]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def bits(self) -> list[str]:
        """Every column that is no time, as text: all digits of a float, and its sign."""
        return [json.dumps({key: value for key, value in row.items() if key not in TIMES}) for row in self.rows]


def copied(run: Run, name: str, *, checkpoints: int, rows: int) -> Path:
    """The directory of a run that ended earlier."""
    directory = run.directory.parent / name
    shutil.copytree(run.directory, directory)
    for step in range(checkpoints + 1, 4):
        shutil.rmtree(directory / f"step_{step}")
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:rows]))
    return directory
