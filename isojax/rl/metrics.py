"""The rows that a run writes, read back."""

import json
from pathlib import Path
from typing import Any


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, in step order; a last line that a crash cut off is none."""
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
