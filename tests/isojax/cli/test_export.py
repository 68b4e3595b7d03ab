"""Checkpoints of runs as Hugging Face folders."""

import json
import shutil
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from isojax.bits import digest
from isojax.models import from_pretrained

pytestmark = pytest.mark.slow

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


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
