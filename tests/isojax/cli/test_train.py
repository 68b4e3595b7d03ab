"""Training as a command: what a run writes, and how it goes on after every way to stop it."""

import re

import pytest
from transformers import AutoTokenizer

from isojax.bits import digest
from isojax.models import from_pretrained
from isojax.rl.checkpoint import load_params
from qwen35_moe import identity
from rollout_bridge.rollouts import Rollouts
from tests.isojax.cli.runs import copied

pytestmark = pytest.mark.slow

COLUMNS = {
    **{"step": int, "reward_mean": float, "logprobs_compared": int, "logprobs_different": int},
    **{"ratio_max_abs_minus_1": float, "kl": float, "entropy": float, "loss": float, "grad_norm": float},
    **{"tokens_per_s": float, "seconds": dict, "weights_version": int, "weights_digest": str, "contract_digest": str},
}
PARTS = {"rollout", "train", "weight_update", "check"}


def test_a_run_writes_one_row_a_step_with_the_columns_that_are_documented(whole, folder):
    rows = whole.rows
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == COLUMNS
        assert row["seconds"].keys() == PARTS
        assert all(type(value) is float and value >= 0 for value in row["seconds"].values())
        assert row["tokens_per_s"] > 0
        assert re.fullmatch("[0-9a-f]{64}", row["weights_digest"])
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["weights_version"] for row in rows] == [0, 1, 2]
    assert [row["logprobs_compared"] for row in rows] == [sum(map(len, drawn)) for drawn in whole.drawn]
    assert {(row["logprobs_different"], row["ratio_max_abs_minus_1"], row["kl"]) for row in rows} == {(0, 0.0, 0.0)}
    assert all(row["grad_norm"] > 0 and row["entropy"] > 0 for row in rows)
    model = from_pretrained(folder / "policy")
    assert {row["contract_digest"] for row in rows} == {identity(model.config, model.ops).digest}
    digests = [digest(load_params(whole.directory / f"step_{step}")[0]) for step in (1, 2, 3)]
    assert [row["weights_digest"] for row in rows] == digests
    assert len({digest(model.params()), *digests}) == 4
    compared = sum(row["logprobs_compared"] for row in rows)
    assert whole.out == f"logprobs compared: {compared}, different: 0, steps: 3, max |ratio - 1|: 0.0\n"


def test_b107_a_run_learns_from_ids_that_no_tokenizer_gives_back(whole, folder):
    # Bytes drawn at random are no text: decoded and encoded again they are other ids, and more of them.
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    drawn = [ids for step in whole.drawn for ids in step]
    again = [tokenizer.encode(tokenizer.decode(ids)) for ids in drawn]
    assert sum(map(len, again)) > sum(map(len, drawn))
    assert sum(row["logprobs_compared"] for row in whole.rows) == sum(map(len, drawn))


def test_a_run_that_was_stopped_goes_on_with_the_bits_of_one_that_was_not(train, whole):
    assert train("stopped", "train.steps=2").code == 0
    resumed = train("stopped", "--resume")
    assert (resumed.code, resumed.out) == (0, whole.out)
    assert resumed.bits == whole.bits
    assert resumed.drawn == whole.drawn[2:]
    digests = [digest(load_params(run.directory / "step_3")[0]) for run in (resumed, whole)]
    assert digests[0] == digests[1]
    positions = [(run.directory / "positions.json").read_text() for run in (resumed, whole)]
    assert positions[0] == positions[1]


@pytest.mark.parametrize("left", [-1, 40], ids=["all but the end of its row", "a piece of its row"])
def test_a_crash_while_a_step_is_written_loses_no_row_and_doubles_none(train, whole, left):
    directory = copied(whole, f"cut_{left}", checkpoints=2, rows=3)
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:left])
    assert train(directory.name, "--resume").bits == whole.bits


def test_a_crash_between_a_row_and_its_checkpoint_makes_the_step_again(train, whole):
    directory = copied(whole, "no_checkpoint", checkpoints=2, rows=3)
    resumed = train(directory.name, "--resume")
    assert resumed.bits == whole.bits
    assert resumed.drawn == whole.drawn[2:]


def test_a_crash_in_the_middle_of_an_update_leaves_the_step_before(train, whole, monkeypatch):
    directory = copied(whole, "crashed", checkpoints=1, rows=1)

    def crash(self, model):
        raise RuntimeError("lost the device")  # The trainer's weights are new, the engine's old.

    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "update_weights", crash)
        with pytest.raises(RuntimeError, match="lost the device"):
            train(directory.name, "--resume")
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 1
    assert train(directory.name, "--resume").bits == whole.bits


def test_a_finished_run_is_not_begun_again(train, whole):
    again = train("whole")
    assert again.code == 2
    assert "pass --resume" in again.err
    assert not again.drawn
