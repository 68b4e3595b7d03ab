import pytest

from isojax.errors import MismatchError, ShardingError
from isojax.verify import Report, Row, direct, engine, verify
from isojax.verify.direct import PLANS
from isojax.verify.phases import Plan

LENGTHS = (1, 62, 63, 64, 200)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_a_plan_advances_every_sequence_by_all_its_tokens_within_its_budget(plan):
    done = [0] * len(LENGTHS)
    for step in plan.steps(LENGTHS):
        assert 0 < sum(step.values()) <= plan.budget
        assert len(step) <= plan.mates
        assert max(step.values()) <= plan.piece
        for sequence, count in step.items():
            done[sequence] += count
    assert tuple(done) == LENGTHS


def test_after_its_prompt_a_sequence_is_decoded_token_by_token():
    steps = list(Plan("", prompts=60).steps([64]))
    assert steps == [{0: 60}, {0: 1}, {0: 1}, {0: 1}, {0: 1}]


def test_decodes_come_before_pieces_of_prompts_and_share_the_budget():
    steps = list(Plan("", prompts=3, budget=4).steps([5, 6]))
    assert steps == [{0: 3, 1: 1}, {0: 1, 1: 2}, {0: 1, 1: 1}, {1: 1}, {1: 1}]


def test_a_row_that_compared_nothing_is_a_failure():
    good, empty = Row("good", "direct", 5, 0), Row("empty", "engine", 0, 0, "the engine did not do this")
    Report((good,)).raise_if_different()
    for rows in ((good, empty), (), (Row("bad", "direct", 5, 1),)):
        with pytest.raises(MismatchError):
            Report(rows).raise_if_different()


def test_the_report_adds_its_rows():
    report = Report((Row("a", "direct", 5, 0), Row("b", "engine", 7, 2), Row("c", "direct", 9, 1, values="gradients")))
    assert str(report) == ("verify: 3 rows, logprobs compared: 12, different: 2; gradient elements: 9, different: 1")
    plain = report.to_json()
    assert (plain["compared"], plain["different"]) == (12, 2)
    assert (plain["gradients_compared"], plain["gradients_different"]) == (9, 1)
    assert plain["rows"][1]["path"] == "engine"


def test_every_row_is_told_as_it_comes_and_is_in_the_report(monkeypatch, tmp_path):
    rows = Row("a", "direct", 5, 0), Row("b", "engine", 7, 0)
    told = []

    def engine_rows(checkpoint, numerics):
        assert told == [rows[0]]
        yield rows[1]

    monkeypatch.setattr(direct, "rows", lambda checkpoint, numerics: iter(rows[:1]))
    monkeypatch.setattr(engine, "rows", engine_rows)
    assert verify(tmp_path, on_row=told.append).rows == rows == tuple(told)
    assert verify(tmp_path, engine=False).rows == rows[:1]


def test_a_parallelism_without_rows_is_refused(tmp_path):
    with pytest.raises(ShardingError, match="--rollout tp=2"):
        verify(tmp_path, train={"dp": 1}, rollout={"tp": 2})
