"""The commands on real runs: a small policy, vLLM's engine in this process, three steps with a checkpoint each."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from isojax.bits import digest
from isojax.models import from_pretrained
from isojax.rl.checkpoint import load_params
from isojax.rl.parity import Mismatch
from isojax.verify import trace
from pallas_kernels.attention import kernel
from qwen35_moe import identity
from rollout_bridge.programs import Programs
from rollout_bridge.rollouts import Rollouts
from tests.qwen35_moe import tiny

pytestmark = pytest.mark.slow

CONFIG = """
[policy]
checkpoint = "{folder}/policy"
[task]
jsonl = "{folder}/questions.jsonl"
reward = "tests.isojax.cli.test_runs:reward"
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

COLUMNS = {
    **{"step": int, "reward_mean": float, "logprobs_compared": int, "logprobs_different": int},
    **{"ratio_max_abs_minus_1": float, "kl": float, "entropy": float, "loss": float, "grad_norm": float},
    **{"tokens_per_s": float, "seconds": dict, "weights_version": int, "weights_digest": str, "contract_digest": str},
}
TIMES = ("tokens_per_s", "seconds")
PARTS = {"rollout", "train", "weight_update", "check"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tiny.write_checkpoint(folder / "policy")
    questions = ("1+2=", "hello", "what is 3?", "ab", "zz top")
    (folder / "questions.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    (folder / "grpo.toml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def train(isojax, folder):
    def train(name: str, *args: str) -> Run:
        drawn, rollout = [], Rollouts.rollout

        def recorded(self, prompts, seeds):
            outputs = rollout(self, prompts, seeds)
            drawn.append([list(c.token_ids) for output in outputs for c in output.outputs])
            return outputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rollouts, "rollout", recorded)
            directory = folder / name
            return Run(
                directory, *isojax("train", folder / "grpo.toml", f"run.directory={directory}", *args), drawn=drawn
            )

    return train


@pytest.fixture(scope="module")
def whole(train):
    """Three steps without an interruption."""
    run = train("whole")
    assert run.code == 0, run.err
    return run


def copied(run: Run, name: str, *, checkpoints: int, rows: int) -> Path:
    """The directory of a run that ended earlier."""
    directory = run.directory.parent / name
    shutil.copytree(run.directory, directory)
    for step in range(checkpoints + 1, 4):
        shutil.rmtree(directory / f"step_{step}")
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:rows]))
    return directory


# Metrics


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


# Resuming


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


# Exporting


def test_an_export_in_float32_has_every_bit_in_isojax_and_in_transformers(isojax, whole, folder, tmp_path):
    out, report = tmp_path / "out", tmp_path / "report.json"
    code, said, _ = isojax("export", whole.directory / "step_3", out, "--dtype", "float32", "--json", report)
    assert code == 0
    assert said.endswith(f"of step 3 to {out}: every bit\n")
    want = whole.rows[2]["weights_digest"]
    found = json.loads(report.read_text())
    assert (found["weights_digest"], found["exported_digest"]) == (want, want)
    assert digest(from_pretrained(out).params()) == want
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype="float32", output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    model.save_pretrained(tmp_path / "again")
    assert digest(from_pretrained(tmp_path / "again").params()) == want
    for name in TOKENIZER:
        assert (out / name).read_bytes() == (folder / "policy" / name).read_bytes()
    assert AutoTokenizer.from_pretrained(out).encode("1+2=") == list(b"1+2=")


def test_an_export_in_the_files_dtypes_says_that_it_rounds(isojax, whole, tmp_path):
    code, said, _ = isojax("export", whole.directory / "step_3", tmp_path / "out", "--json", tmp_path / "report.json")
    assert code == 0
    assert said.endswith("rounded to the files' dtypes\n")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["exported_digest"] == digest(from_pretrained(tmp_path / "out").params()) != found["weights_digest"]


def test_an_export_overwrites_nothing_and_leaves_nothing_half_written(isojax, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    code, said, err = isojax("export", whole.directory / "step_3", out)
    assert (code, said) == (2, "")
    assert f"{out} is in use: export into a new folder" in err
    assert (out / "notes.txt").read_text() == "mine"

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)  # The tokenizer comes last, after all tensors.
    with pytest.raises(OSError, match="No space"):
        isojax("export", whole.directory / "step_3", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_without_the_runs_policy_is_refused(isojax, whole, folder, tmp_path):
    policy = folder / "policy"
    policy.rename(folder / "away")
    try:
        code, _, err = isojax("export", whole.directory / "step_3", tmp_path / "out")
    finally:
        (folder / "away").rename(policy)
    assert code == 2
    assert str(policy) in err


# Comparing


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
