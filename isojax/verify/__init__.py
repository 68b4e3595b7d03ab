"""Trainer against engine on one checkpoint, bit for bit, over the ways to run them."""

from collections.abc import Mapping
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
) -> Report:
    """Runs every row: direct ones through the model's phases, engine ones through vLLM.

    Args:
        checkpoint: A Hugging Face folder.
        numerics: The contract to bind; with `"native"` rows differ.
        train: Parallelism of the trainer, by axis.
        rollout: Parallelism of the engine.
        engine: Whether to run the rows that need vLLM.

    Raises:
        ShardingError: If a parallelism is asked for that has no rows.
    """
    from isojax.verify import direct

    for side, axes in (("train", train or {}), ("rollout", rollout or {})):
        for axis, degree in axes.items():
            if degree != 1:
                raise ShardingError(f"--{side} {axis}={degree}: verify runs one device on each side, use {axis}=1")
    rows = list(direct.rows(checkpoint, numerics))
    if engine:
        from isojax.verify import engine as engine_rows

        rows += engine_rows.rows(checkpoint, numerics)
    return Report(tuple(rows))
