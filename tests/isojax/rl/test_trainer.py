import json
from types import SimpleNamespace

import numpy as np
import pytest

from isojax.bits import digest
from isojax.errors import CheckpointError, MismatchError
from isojax.rl import gradient, trainer
from isojax.rl.checkpoint import load_params
from isojax.rl.config import Config
from isojax.rl.gradient import score
from isojax.rl.packing import pack
from isojax.rl.parity import Mismatch
from isojax.rl.tasks import ReasoningGym
from isojax.rl.trainer import Summary, Trainer, items_of
from tests.isojax.rl.outputs import completion, request
from tests.isojax.rl.policies import Bigram, bigram, score_rows

DETERMINISTIC = ("step", "reward_mean", "logprobs_compared", "loss", "grad_norm", "entropy", "weights_digest")


class Engine:
    """Draws tokens from the seed alone, and scores them as the trainer does, with weights of its own."""

    def __init__(self, model: Bigram, wrong: bool = False):
        self.weights_version, self._wrong = 0, wrong
        self.update_weights(model)
        self.weights_version = 0

    def update_weights(self, model: Bigram) -> None:
        self._model = Bigram(model.ops)
        for name, value in model.params().items():
            self._model.weights[name].set_value(value)
        self.weights_version += 1

    def close(self) -> None:
        pass

    def rollout(self, prompts, seeds):
        outputs = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            rng = np.random.default_rng(seed)
            tokens = [rng.integers(48, 58, 3) for _ in range(2)]
            spans = [(str(self.weights_version), 0, 3)]
            outputs.append(
                request(
                    [ord(c) for c in prompt], [completion(t, [0.0] * 3, spans, index=i) for i, t in enumerate(tokens)]
                )
            )
        batch = pack(outputs, np.zeros((len(outputs), 2), np.float32), 1 << 20)
        values = score(self._model, batch).logprobs
        for number, sample in enumerate(batch.samples):
            rows = batch.sequence_rows(number)
            drawn = outputs[sample.prompt].outputs[sample.sample]
            scores = values[rows][batch.mask[rows]]
            if self._wrong:
                scores = np.nextafter(scores, np.float32(-9))
            drawn.logprobs = [
                {t: SimpleNamespace(logprob=float(v))} for t, v in zip(drawn.token_ids, scores, strict=True)
            ]
            drawn.text = "".join(map(chr, drawn.token_ids))
        return outputs


@pytest.fixture(autouse=True)
def _small_policy(monkeypatch):
    monkeypatch.setattr(gradient, "score_rows", score_rows)
    monkeypatch.setattr(trainer, "from_pretrained", lambda path, numerics, dtype: bigram(numerics))
    monkeypatch.setattr(Trainer, "contract_digest", "c0ffee")
    monkeypatch.setattr(ReasoningGym, "verify", lambda self, text, item: float(text < "5"))


@pytest.fixture
def config(tmp_path):
    def config(name="run", steps=4, **policy):
        return Config.model_validate(
            {
                "policy": {"checkpoint": "unused", **policy},
                "task": {"reasoning_gym": "chain_sum", "size": 50, "held_out": 5},
                "sampling": {"n": 2, "max_tokens": 3},
                "optimizer": {"lr": 1e-2},
                "train": {"steps": steps, "prompts": 4},
                "run": {"directory": tmp_path / name, "checkpoint_every": 2},
            }
        )

    return config


def connect(model, config):
    return Engine(model)


def test_a_run_compares_every_logprob_before_every_update(config):
    run = config()
    rows = list(Trainer(run, connect).run())
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["weights_version"] for row in rows] == [0, 1, 2, 3]
    assert {row["logprobs_compared"] for row in rows} == {4 * 2 * 3}
    assert {row["ratio_max_abs_minus_1"] for row in rows} == {0.0}
    assert len({row["weights_digest"] for row in rows}) == 4
    assert str(Summary.of(rows)) == "logprobs compared: 96, different: 0, steps: 4, max |ratio - 1|: 0.0"
    written = [json.loads(line) for line in (run.run.directory / "metrics.jsonl").read_text().splitlines()]
    assert written == rows
    assert json.loads((run.run.directory / "positions.json").read_text()) == {
        "compared": [32] * 3,
        "different": [0] * 3,
    }


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(config):
    whole = list(Trainer(config("whole"), connect).run())
    stopped = Trainer(config("resumed"), connect).run()
    first = [next(stopped) for _ in range(3)]  # The third step is after the checkpoint: it is made again.
    again = list(Trainer(config("resumed"), connect, resume=True).run())
    assert [row["step"] for row in again] == [3, 4]
    for row, want in zip(first[:2] + again, whole, strict=True):
        assert {key: row[key] for key in DETERMINISTIC} == {key: want[key] for key in DETERMINISTIC}
        assert row["weights_version"] == want["weights_version"]
    metrics = [(config(name).run.directory / "metrics.jsonl").read_text().splitlines() for name in ("whole", "resumed")]
    assert len(metrics[0]) == len(metrics[1]) == 4
    positions = [(config(name).run.directory / "positions.json").read_text() for name in ("whole", "resumed")]
    assert positions[0] == positions[1]


def test_a_differing_bit_stops_the_run_before_its_update(config):
    run = config()
    session = Trainer(run, lambda model, config: Engine(model, wrong=True))
    before = digest(session.model.params())
    with pytest.raises(MismatchError, match="24 of 24 log-probabilities differ; no update was applied"):
        next(session.run())
    assert digest(session.model.params()) == before
    assert Mismatch.load(run.run.directory / "mismatch_0000.npz").samples
    params, _ = load_params(run.run.directory / "step_0")  # What `isojax diff` replays with.
    assert digest(params) == before


def test_native_numerics_count_and_go_on(config):
    session = Trainer(config(steps=1, numerics="native"), lambda model, config: Engine(model, wrong=True))
    (row,) = session.run()
    assert row["logprobs_different"] == row["logprobs_compared"] == 24
    assert row["ratio_max_abs_minus_1"] > 0


def test_a_directory_with_a_run_is_not_overwritten(config):
    list(Trainer(config(steps=2), connect).run())
    with pytest.raises(CheckpointError, match="pass --resume"):
        Trainer(config(steps=4), connect)


def test_items_of_a_step_depend_on_seed_and_step_alone(config):
    first, again = (items_of(config().task.build(), config(), step) for step in (0, 0))
    assert first == again
    assert first != items_of(config().task.build(), config(), 1)
