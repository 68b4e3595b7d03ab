import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from isojax.rl.metrics import read_metrics
from isojax.rl.report import line_chart, write_report

ROW = {
    "reward_mean": 0.5,
    "logprobs_different": 0,
    "entropy": 1.0,
    "loss": -0.1,
    "grad_norm": 2.0,
    "seconds": {"rollout": 1.0, "train": 2.0, "check": 0.1, "weight_update": 0.2},
    "contract_digest": "<c0ffee>",
}


@pytest.fixture
def run(tmp_path):
    rows = [{"step": step, **ROW} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "positions.json").write_text(json.dumps({"compared": [9, 9, 0], "different": [0, 0, 0]}))
    return tmp_path


def test_the_report_is_one_file_that_fetches_and_runs_nothing(run):
    page = write_report(run, "demo", "logprobs compared: 18, different: 0").read_text()
    assert "logprobs compared: 18, different: 0" in page
    assert "&lt;c0ffee&gt;" in page
    assert not re.search(r"<script|<link|@import|src=|href=.[^#]|url\([^#]", page)


def test_the_contrast_is_drawn_beside_the_run(run):
    contrast = {"compared": 100, "different": 40, "max_abs": 0.01, "by_position": [0.1, 0.4, 0.7]}
    page = write_report(run, "demo", "", contrast).read_text()
    assert "40 of 100" in page
    assert page.count("native</text>") == 1
    assert "native" not in write_report(run, "demo", "").read_text()


def test_a_chart_has_a_line_for_every_series():
    chart = ElementTree.fromstring(line_chart({"a": ([0, 1, 2], [-3.0, 5.0, 2.0]), "b<": ([0, 2], [1.0, 1.0])}))
    names = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert names[-2:] == ["a", "b<"]


@pytest.mark.parametrize("values", [[], [0.0], [2.0, 2.0]])
def test_flat_and_empty_lines_have_a_chart(values):
    ElementTree.fromstring(line_chart({"a": (list(range(len(values))), values)}))


def test_metrics_are_read_in_order(run):
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
