"""Breaks of a running engine go red and name themselves; tests/test_negative_controls.py breaks ops."""

import dataclasses

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from isojax.errors import MismatchError
from isojax.rl.packing import pack
from isojax.rl.parity import check_parity
from isojax.samples import read_samples
from isojax.sampling import Sampling
from rollout_bridge import sampling, scheduler
from rollout_bridge.diagnosis import diagnose
from tests.rollout_bridge.engines import prompts, sample, sequence, start, trainer_scores

TEMPERATURE = 0.8


@pytest.fixture
def engine(policies):
    llm = start(policies[0])
    yield llm
    llm.close()


def generate(llm, **options):
    return llm.generate(prompts(20, 200, 30, seed=50), sample(seed=1, **options), use_tqdm=False)


def mismatch(llm, model, outputs, directory) -> str:
    """What the check before an update says of these rollouts."""
    batch = pack(outputs, np.ones((len(outputs), 1)), 4096)
    logprobs = np.zeros(batch.mask.size, np.float32)
    ids = [sequence(o, c) for o in outputs for c in o.outputs]
    for number, scores in enumerate(trainer_scores(model, ids, TEMPERATURE)):
        logprobs[batch.sequence_rows(number)][: len(scores)] = scores

    def explain(found):
        return diagnose(llm, model, found.samples[0], found.trainer[0], found.sampling)

    with pytest.raises(MismatchError) as stopped:
        check_parity(batch, logprobs, directory=directory, explain=explain)
    return str(stopped.value)


def test_a_cache_reset_that_was_skipped_goes_red_and_is_named(engine, policies, monkeypatch, tmp_path):
    generate(engine)
    monkeypatch.setattr(scheduler.BoundScheduler, "schedule", Scheduler.schedule)
    engine.update_weights(policies[1])
    outputs = generate(engine)
    assert [o.num_cached_tokens for o in outputs] == [0, 192, 0]
    message = mismatch(engine, policies[1], outputs, tmp_path)
    assert "12 of 36 log-probabilities differ" in message
    assert "request 1, sample 0, position 200" in message
    assert "without the 192 tokens that it took from its prefix cache" in message
    assert "the cache was not reset after an update" in message


def test_one_weight_altered_after_an_update_goes_red_and_is_named(engine, policies, tmp_path):
    engine.update_weights(policies[1])
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    held = worker.weights.params["layers"]["2"]["mixer"]
    held["out_proj"] = held["out_proj"].at[0, 3, 5].multiply(1.5)
    message = mismatch(engine, policies[1], generate(engine), tmp_path)
    assert "the engine's weights are not the trainer's: layers.2.mixer.out_proj\n" in message


def test_another_temperature_of_one_request_goes_red_and_is_named(engine, policies, monkeypatch, tmp_path):
    right = sampling.controls

    def hotter(requests, *args, **options):
        made = right(requests, *args, **options)
        second = np.array([r.prompt_len == 200 for r in requests] + [False] * (len(made.slot) - len(requests)))
        return dataclasses.replace(made, temperature=np.where(second, np.float32(0.9), made.temperature))

    monkeypatch.setattr(sampling, "controls", hotter)
    message = mismatch(engine, policies[0], generate(engine), tmp_path)
    assert "12 of 36 log-probabilities differ" in message
    assert "request 1, sample 0, position 200" in message
    assert "again at temperature 0.8: the request was drawn at another temperature than it says" in message


def test_what_neither_weights_nor_cache_nor_temperature_explain_is_an_op(engine, policies):
    [read] = read_samples(generate(engine)[:1])
    other = np.nextafter(read.logprobs, np.float32(-9))
    drawn = Sampling(temperature=TEMPERATURE)
    assert "again with other bits: an op differs in it" in diagnose(engine, policies[0], read, other, drawn)
    truncated = dataclasses.replace(drawn, top_k=5)
    assert "does not score truncated" in diagnose(engine, policies[0], read, other, truncated)
