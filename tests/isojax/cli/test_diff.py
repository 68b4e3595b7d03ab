"""Runs side by side, and a mismatch traced to its op."""

import dataclasses
import json
import re
import shutil

import pytest

from isojax.rl.parity import Mismatch
from isojax.verify import trace
from pallas_kernels.attention import kernel
from rollout_bridge.programs import Programs
from tests.isojax.cli.runs import copied

pytestmark = pytest.mark.slow


def test_equal_runs_are_said_to_be_equal(isojax, train, whole):
    directory = copied(whole, "shorter", checkpoints=2, rows=2)
    assert isojax("diff", whole.directory, whole.directory)[:2] == (
        0,
        "3 common steps have equal metrics, weights and contract\n",
    )
    code, out, _ = isojax("diff", whole.directory, directory)
    assert code == 0
    assert out == f"2 common steps have equal metrics, weights and contract; {whole.directory} goes on to step 3\n"


def test_runs_without_a_common_step_are_not_called_equal(isojax, whole, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(whole.bits[0].replace('"step": 1', '"step": 7') + "\n")
    code, out, err = isojax("diff", whole.directory, tmp_path)
    assert (code, out) == (2, "")
    assert "no step in common" in err


def test_another_learning_rate_is_named_with_the_first_weights_that_it_moved(isojax, train, whole, tmp_path):
    other = train("faster", "optimizer.lr=2e-3")
    code, out, _ = isojax("diff", whole.directory, other.directory, "--json", tmp_path / "diff.json")
    assert code == 1
    step, settings, *weights = out.splitlines()
    assert step.startswith("step 1 is the first that differs: weights_digest ")
    assert settings == "settings: optimizer.lr 0.001 and 0.002"
    assert weights[0] == "weights after step 0 are equal"
    assert re.match(r"weights after step 1 differ first in embed_tokens\[\d+, \d+\]: [\d,]+ of 400,888$", weights[1])
    report = json.loads((tmp_path / "diff.json").read_text())
    assert (report["step"], report["metric"], report["parameters"]["first"]["leaf"]) == (
        1,
        "weights_digest",
        "embed_tokens",
    )


def test_other_numerics_are_named_with_the_first_op_that_they_part(isojax, whole):
    directory = copied(whole, "native", checkpoints=2, rows=3)
    for step in (1, 2):
        notes = next((directory / f"step_{step}" / "notes").iterdir())
        notes.write_text(notes.read_text().replace('"numerics": "exact"', '"numerics": "native"'))
    metrics = directory / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(whole.rows[0]["contract_digest"], "0" * 64))
    code, out, _ = isojax("diff", whole.directory, directory)
    assert code == 1
    step, settings, equal, op, _ = out.splitlines()
    assert step.startswith("step 1 is the first that differs: contract_digest ")
    assert settings == "settings: policy.numerics 'exact' and 'native'"
    assert equal == "weights after step 0 are equal"
    assert re.match(r"from them, first differing op: \w+, layer 0, token \d+ \(\d+ of \d+ elements\)$", op)


@pytest.fixture
def forgetful(monkeypatch):
    """Attention that in decode forgets the newest token, in programs that engines make from now on."""
    right = kernel.attention_decode

    def forgets(q, kv, kv_pages, decode, *settings):
        return right(q, kv, kv_pages, dataclasses.replace(decode, position=decode.position - 1), *settings)

    monkeypatch.setattr(kernel, "attention_decode", forgets)
    Programs.shared.cache_clear()
    yield
    Programs.shared.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_a_mismatch_stops_the_run_and_its_file_names_op_layer_and_token(isojax, train, whole, monkeypatch, tmp_path):
    directory = copied(whole, "mismatch", checkpoints=1, rows=1)
    with monkeypatch.context() as patch:  # As if no op explained it: then the engine is asked.
        patch.setattr(trace, "explain", lambda model, mismatch: trace.Explanation(None, (False, True), 0, 0))
        run = train("mismatch", "--resume")
    file = directory / "mismatch_0001.npz"
    assert (run.code, len(run.rows)) == (1, 1)
    assert "log-probabilities differ; no update was applied" in run.err
    assert "the engine has the trainer's weights, and its bits when it scores request 0, sample 0 again" in run.err
    assert f"isojax diff {file}" in run.err
    code, out, _ = isojax("diff", file, "--json", tmp_path / "diff.json")
    assert code == 1
    first = Mismatch.load(file).samples[0]
    named = f"first differing op: attention.core, layer 3, token {len(first.prompt_tokens)} "
    assert named in out
    assert "cannot be reproduced" not in out
    report = json.loads((tmp_path / "diff.json").read_text())["difference"]
    assert (report["op"], report["layer"], report["token"]) == ("attention.core", 3, len(first.prompt_tokens))
    # A file that was moved no longer says where its weights are.
    shutil.copy(file, tmp_path / "found.npz")
    assert isojax("diff", tmp_path / "found.npz")[0] == 2
