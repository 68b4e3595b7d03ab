import json
import subprocess
import sys

import pytest

from isojax.cli.app import parallelism
from isojax.cli.train import DEMO
from isojax.errors import ConfigError

CONFIG = """
[policy]
checkpoint = "{folder}"
[task]
reasoning_gym = "chain_sum"
size = 20
[sampling]
max_tokens = 8
"""


def test_help_names_every_command_and_shows_defaults(isojax):
    code, out, _ = isojax("--help")
    assert code == 0
    for command in ("doctor", "verify", "train", "serve", "audit", "diff", "export", "contract"):
        assert command in out
    assert "demo" not in out
    assert "[default: exact]" in isojax("verify", "--help")[1]


def test_help_loads_neither_jax_nor_vllm():
    code = (
        "import sys; from isojax.cli.app import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'jax', 'vllm', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_doctor_says_what_is_here(isojax, tmp_path):
    code, out, err = isojax("doctor", "--json", tmp_path / "doctor.json")
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["facts"]["versions"]["jax"] == "0.11.2"
    assert report["facts"]["vLLM"]["build"] == "Python only"
    assert "0.11.2" in err
    assert (code, "everything" in out) == ((2, False) if report["problems"] else (0, True))


def test_doctor_refuses_flags_that_change_rounding(isojax, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    code, _, err = isojax("doctor")
    assert code == 2
    assert "xla_cpu_enable_fast_math=true lets LLVM reassociate sums" in err


def test_refusals_exit_with_2_and_say_all_violations(isojax, tmp_path):
    path = tmp_path / "grpo.toml"
    path.write_text(CONFIG.format(folder=tmp_path / "nowhere"))
    code, out, err = isojax("train", path, "optimizer.lrr=1", "--dry-run")
    assert (code, out) == (2, "")
    assert "ConfigError" in err
    assert "did you mean lr?" in err


def test_a_dry_run_checks_everything_and_trains_nothing(isojax, tmp_path):
    out_json = tmp_path / "plan.json"
    code, out, err = isojax(
        "train", DEMO, "train.steps=7", f"run.directory={tmp_path}", "--dry-run", "--json", out_json
    )
    assert code == 0
    assert out == f"{DEMO}: ready, nothing was trained\n"
    assert "7 steps" in err
    assert "log-probabilities compared before every update" in err
    assert json.loads(out_json.read_text())["config"]["train"]["steps"] == 7
    assert list(tmp_path.iterdir()) == [out_json]


def test_numerics_native_are_announced(isojax):
    assert "NOTHING IS PROMISED" in isojax("train", DEMO, "policy.numerics=native", "--dry-run")[2]


def test_a_contract_is_shown_op_by_op(isojax, tmp_path):
    code, out, _ = isojax("contract", "show", "exact", "--json", tmp_path / "contract.json")
    assert code == 0
    assert "exact (exact)" in out
    assert "isojax.trees.fold" in out
    assert json.loads((tmp_path / "contract.json").read_text())["digest"] in out
    assert isojax("contract", "show", "no_such_contract")[0] == 2


def test_unknown_commands_and_options_exit_with_2(isojax):
    assert isojax("tarin")[0] == 2
    assert isojax("train", "--fast")[0] == 2


def test_a_program_with_arithmetic_outside_ops_exits_with_1(isojax, tmp_path, monkeypatch):
    (tmp_path / "audited_by_this_test.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(x):\n    return jnp.sum(x)\n"
        "def loss_args():\n    return (jax.ShapeDtypeStruct((2048,), jnp.float32),)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = isojax("audit", "audited_by_this_test:loss", "--json", "audit.json")
    assert code == 1
    assert "AuditError" in err
    assert "audited_by_this_test.py:3" in out
    assert json.loads((tmp_path / "audit.json").read_text())["findings"]


def test_diff_refuses_what_is_no_run(isojax, tmp_path):
    assert isojax("diff", tmp_path / "mismatch_0001.npz")[0] == 2
    assert isojax("diff", tmp_path, tmp_path)[0] == 2


@pytest.mark.parametrize("text", ["tensor", "tensor=0", "pipeline=2", "tensor=x"])
def test_parallelism_is_written_as_axis_and_degree(text):
    assert parallelism("data=2, tensor=4") == {"data": 2, "tensor": 4}
    with pytest.raises(ConfigError):
        parallelism(text)
