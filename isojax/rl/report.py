"""What a run leaves for people: one HTML file with its plots inside, no script, nothing fetched."""

import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isojax.rl.metrics import read_metrics

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


def line_chart(series: Mapping[str, tuple[Sequence[int | float], Sequence[int | float]]]) -> str:
    """Lines over common axes, as inline SVG; of values that are never negative from 0 on."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "isojax", "font.family": "sans-serif"}):
        figure = Figure(figsize=(7, 2.4), layout="constrained")
        axes = figure.subplots()
        for name, (xs, ys) in series.items():
            axes.plot(xs, ys, label=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if min((y for _, ys in series.values() for y in ys), default=0) >= 0:
            axes.set_ylim(bottom=0)
        if len(series) > 1:
            axes.legend(frameon=False)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return svg.getvalue()[svg.getvalue().index("<svg") :]


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
