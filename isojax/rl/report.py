"""What a run leaves for people: one HTML file with its plots inside, no script, nothing fetched."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 220, 64, 28, 12
_COLORS = ("#1f6feb", "#d1242f")

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:720px;margin:2rem auto;padding:0 1rem;color:#1f2328}}
table{{border-collapse:collapse;font-size:13px}}td,th{{padding:2px 10px 2px 0;text-align:left;vertical-align:top}}
svg{{width:100%;height:auto}}code{{font-size:12px;overflow-wrap:anywhere}}.note{{color:#59636e}}
</style>
<h1>{title}</h1>
<p><b>{closing}</b></p>
{body}
</html>
"""


def write_report(directory: Path, title: str, closing: str, contrast: Mapping[str, Any] | None = None) -> Path:
    """Writes `report.html` into a run's directory from its `metrics.jsonl` and `positions.json`.

    Args:
        directory: Of the run.
        title: Of the page.
        closing: The run's closing line.
        contrast: The same prompts with numerics native: `compared`, `different`, `max_abs`, and
            `by_position`, the share of differing log-probabilities at each output position.

    Returns:
        The path of the report.
    """
    rows = read_metrics(directory)
    steps = [row["step"] for row in rows]
    positions = json.loads((directory / "positions.json").read_text())
    sections = [
        _section(
            "Reward", "mean over the samples of a step", line_chart({"reward": (steps, _of(rows, "reward_mean"))})
        ),
        _section(
            "Differences by step",
            "log-probabilities whose bits differ between rollout engine and trainer",
            line_chart({"exact": (steps, _of(rows, "logprobs_different"))}),
        ),
    ]
    by_position = {"exact": (list(range(len(positions["compared"]))), _shares(positions))}
    if contrast:
        shares = contrast["by_position"]
        by_position["native"] = (list(range(len(shares))), list(shares))
    sections.append(
        _section("Differences by position", "share that differs at each output position", line_chart(by_position))
    )
    if contrast:
        sections.append(
            f"<p>The same prompts with numerics <i>native</i>: {contrast['different']:,} of {contrast['compared']:,}"
            f" log-probabilities differ, by up to {contrast['max_abs']:.2e}.</p>"
        )
    for name, label in (("entropy", "nats per token"), ("loss", "per token"), ("grad_norm", "before clipping")):
        sections.append(
            _section(name.replace("_", " ").capitalize(), label, line_chart({name: (steps, _of(rows, name))}))
        )
    sections.append(_section("Seconds", "of each part of a step", _seconds(rows)))
    sections.append(_section("Fingerprints", "of the last step", _table(rows[-1])))
    path = directory / "report.html"
    path.write_text(_PAGE.format(title=html.escape(title), closing=html.escape(closing), body="\n".join(sections)))
    return path


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, in step order; a last line that a crash cut off is none."""
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def line_chart(series: Mapping[str, tuple[Sequence[int | float], Sequence[int | float]]]) -> str:
    """One or two lines over common axes, as inline SVG."""
    xs = [x for line, _ in series.values() for x in line]
    ys = [y for _, line in series.values() for y in line]
    (left, right), (low, high) = _span(xs), _span([0.0, *ys] if min(ys, default=0) >= 0 else ys)

    def point(x: int | float, y: int | float) -> str:
        across = _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - 8)
        down = _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)
        return f"{across:.1f},{down:.1f}"

    marks = []
    for y in (low, (low + high) / 2, high):
        x0, y0 = point(left, y).split(",")
        marks.append(f'<line x1="{x0}" x2="{_WIDTH - 8}" y1="{y0}" y2="{y0}" stroke="#d1d9e0"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{float(y0) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for x in (left, right):
        x0, _ = point(x, low).split(",")
        marks.append(f'<text x="{x0}" y="{_HEIGHT - 8}" text-anchor="middle">{x:.6g}</text>')
    for (name, (line, values)), color in zip(series.items(), _COLORS, strict=False):
        path = " ".join(point(x, y) for x, y in zip(line, values, strict=True))
        marks.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        offset = 16 + 14 * list(series).index(name)
        marks.append(
            f'<text x="{_WIDTH - 10}" y="{offset}" text-anchor="end" fill="{color}">{html.escape(name)}</text>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="11" font-family="sans-serif">{"".join(marks)}</svg>'


def _span(values: Sequence[int | float]) -> tuple[int | float, int | float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low, low + 1.0)


def _of(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows]


def _shares(positions: Mapping[str, Sequence[int]]) -> list[float]:
    return [d / c if c else 0.0 for d, c in zip(positions["different"], positions["compared"], strict=True)]


def _section(title: str, note: str, content: str) -> str:
    return f'<h2>{html.escape(title)}</h2><p class="note">{html.escape(note)}</p>{content}'


def _seconds(rows: Sequence[Mapping[str, Any]]) -> str:
    totals = {name: sum(row["seconds"][name] for row in rows) for name in rows[0]["seconds"]}
    return _table({name: f"{total:.1f} in all, {total / len(rows):.2f} a step" for name, total in totals.items()})


def _table(row: Mapping[str, Any]) -> str:
    cells = (f"<tr><th>{html.escape(str(k))}<td><code>{html.escape(str(v))}</code>" for k, v in row.items())
    return f"<table>{''.join(cells)}</table>"
