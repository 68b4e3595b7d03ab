import contextlib
import io
import json
import sys
from unittest import mock

import pytest

from isojax import cli
from rollout_bridge.rollouts import Rollouts
from tests.isojax.cli.runs import CONFIG, Run
from tests.qwen35_moe import tiny


@pytest.fixture(scope="session")
def isojax():
    """Runs the command: exit code, stdout, stderr."""

    def run(*args):
        out, err, code = io.StringIO(), io.StringIO(), 0
        command = mock.patch.object(sys, "argv", ["isojax", *map(str, args)])
        with command, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as stopped:
                code = stopped.code or 0
        return code, out.getvalue(), err.getvalue()

    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tiny.write_checkpoint(folder / "policy")
    questions = ("1+2=", "hello", "what is 3?", "ab", "zz top")
    (folder / "questions.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    (folder / "grpo.toml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def whole(train):
    """Three steps without an interruption."""
    run = train("whole")
    assert run.code == 0, run.err
    return run
