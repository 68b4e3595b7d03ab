"""Trainer against engine on one checkpoint, bit for bit, over the ways to run them."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from isojax.errors import ShardingError
from isojax.verify.report import Report, Row

__all__ = ["Report", "Row", "verify"]


def verify(
    checkpoint: Path,
    *,
    numerics: str = "exact",
    train: Mapping[str, int] | None = None,
    rollout: Mapping[str, int] | None = None,
    engine: bool = True,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Runs every row: direct ones through the model's phases, engine ones through vLLM.

    Args:
        checkpoint: A Hugging Face folder.
        numerics: The contract to bind; with `"native"` rows differ.
        train: Parallelism of the trainer, by axis.
        rollout: Parallelism of the engine.
        engine: Whether to run the rows that need vLLM.
        on_row: Called with every row when it is there: rows take seconds to a minute each.

    Raises:
        ShardingError: If a parallelism is asked for that has no rows.
    """
    from isojax.verify import direct

    for side, axes in (("train", train or {}), ("rollout", rollout or {})):
        for axis, degree in axes.items():
            if degree != 1:
                raise ShardingError(f"--{side} {axis}={degree}: verify runs one device on each side, use {axis}=1")
    found = direct.rows(checkpoint, numerics)
    if engine:
        from isojax.verify import engine as engine_rows

        found = itertools.chain(found, engine_rows.rows(checkpoint, numerics))
    rows = []
    for row in found:
        on_row(row)
        rows.append(row)
    return Report(tuple(rows))
