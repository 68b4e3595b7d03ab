import importlib.util
import json
from pathlib import Path

import pytest

from rollout_bridge import LLM
from tests.qwen35_moe import tiny
from tests.rollout_bridge.engines import SIZES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    tiny.write_checkpoint(folder)
    return folder


@pytest.fixture
def example(monkeypatch):
    """An example as a module, its engine with few shapes to compile."""

    def example(name):
        path = Path(__file__).parents[2] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "LLM", lambda *args, **options: LLM(*args, **options | SIZES))
        return module

    return example


def test_grpo_trains_with_every_logprob_equal(example, checkpoint, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(9)))
    example("grpo").main(str(checkpoint), str(data), steps=2, prompts=2, max_tokens=6)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1"]
    assert all(line.endswith("compared, 0 different") for line in lines)


def test_an_own_loop_keeps_its_logprobs_exact(example, checkpoint, capsys):
    module = example("own_loop")
    module.main(str(checkpoint), steps=1, batch_size=2, samples=4, max_tokens=6)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("compared, 0 different")
