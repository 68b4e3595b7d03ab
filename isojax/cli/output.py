"""Results on stdout, progress on stderr, and `--json`."""

import json
import math
from pathlib import Path
from typing import Any

import typer


def closing(line: str) -> None:
    """The one line that a command ends with, on stdout."""
    typer.echo(line)


def note(line: str) -> None:
    """A line for the person who waits, on stderr."""
    typer.echo(line, err=True)


def write_json(path: Path | None, value: Any) -> None:
    """Writes a result where `--json` asked for it; infinities and NaN as text, paths as text."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_plain(value), indent=2) + "\n")


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    return str(value)
