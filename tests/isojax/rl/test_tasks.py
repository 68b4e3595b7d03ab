import json

import pytest

from isojax.errors import ConfigError
from isojax.rl.config import TaskSource
from isojax.rl.tasks import Jsonl, ReasoningGym, Task, load_function

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def exact(text, row):
    return float(text == row["answer"])


def test_only_a_full_score_is_a_reward():
    task = ReasoningGym("chain_sum", size=200, options={"min_digits": 1, "max_digits": 2})
    item = next(item for item in task.items if item["answer"] == "7")
    assert task._dataset.score_answer("7777", dict(item)) > 0  # Partial credit, which must not count.
    assert task.verify("7777", item) == 0.0
    assert task.verify(" 7\n", item) == 1.0
    assert isinstance(task, Task)


def test_items_of_a_seed_are_the_same_each_time():
    first, again = (ReasoningGym("chain_sum", size=20, seed=3, options=SMALL).items for _ in range(2))
    assert [i["question"] for i in first] == [i["question"] for i in again]


def test_held_out_questions_are_not_trained_on():
    source = TaskSource(reasoning_gym="chain_sum", options=SMALL, size=500, held_out=30)
    held_out = {item["question"] for item in source.build_held_out().items}
    assert held_out.isdisjoint(item["question"] for item in source.build().items)
    everything = ReasoningGym("chain_sum", size=500, options=SMALL).items
    assert not held_out.isdisjoint(item["question"] for item in everything)


def test_unknown_data_sets_and_options_are_refused():
    with pytest.raises(ConfigError, match="refuses nonsense"):
        _ = ReasoningGym("nonsense").items
    with pytest.raises(ConfigError, match="min_words"):
        _ = ReasoningGym("chain_sum", options={"min_words": 2}).items


def test_rows_of_a_file_are_graded_by_the_users_function(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}+1", "answer": str(i + 1)}) for i in range(3)) + "\n\n")
    task = Jsonl(path, exact)
    assert [task.prompt(item) for item in task.items] == ["0+1", "1+1", "2+1"]
    assert [task.verify("2", item) for item in task.items] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("line", ["{", "[1]", '{"prompt": "x"}'])
def test_a_bad_row_is_named_by_its_line(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "x"}\n' + line)
    with pytest.raises(ConfigError, match=r"data\.jsonl:2"):
        _ = Jsonl(path, exact).items


def test_functions_are_found_by_name_or_refused(tmp_path, monkeypatch):
    (tmp_path / "grader_of_this_test.py").write_text("def reward(text, row):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("grader_of_this_test:reward")("", {}) == 0.5
    for name in ("grader_of_this_test:nothing", "no_such_module:f", "json", "grader_of_this_test:__name__"):
        with pytest.raises(ConfigError):
            load_function(name)
