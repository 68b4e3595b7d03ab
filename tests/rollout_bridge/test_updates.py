"""Weights of a running engine: whole or not at all, under a version, and never with the cache of others."""

import jax
import numpy as np
import pytest
from flax import nnx

from isojax.errors import WeightsError
from qwen35_moe.checkpoint import export
from rollout_bridge import tokens_and_logprobs
from tests.rollout_bridge.engines import (
    assert_same_samples,
    assert_trainer_agrees,
    policy,
    prompts,
    sample,
    sampled,
    sequence,
    start,
    trainer_scores,
)


@pytest.fixture
def engine(policies):
    llm = start(policies[0])
    yield llm
    llm.close()


def generate(llm, seed=40, **options):
    return llm.generate(prompts(20, 200, seed=seed), sample(seed=1, **options), use_tqdm=False)


def test_b101_a_prefix_of_old_weights_is_never_used(engine, policies):
    generate(engine)
    assert engine.update_weights(policies[1]) == 1
    outputs = generate(engine)
    assert [o.num_cached_tokens for o in outputs] == [0, 0]
    assert_trainer_agrees(policies[1], outputs)
    assert generate(engine)[1].num_cached_tokens  # The new weights' own prefix is.


def test_b100_three_updates_equal_three_fresh_engines(engine, policies):
    for round_, model in enumerate((policies[1], policies[0], policies[1])):
        engine.update_weights(model)
        assert engine.weights_version == round_ + 1
        assert_trainer_agrees(model, generate(engine, seed=41 + round_))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: p.pop("lm_head"), "lm_head is missing"),
        (lambda p: p.update(extra=np.zeros(3, np.float32)), "extra is unknown"),
        (lambda p: p.update(norm=np.zeros(3, np.float32)), r"norm has shape \[3\]"),
        (lambda p: p.update(norm=np.zeros(64, np.int32)), "norm is int32"),
    ],
)
def test_b097_an_update_that_is_not_whole_changes_nothing(engine, policies, change, named):
    digest = engine.weights_digest
    params = dict(policies[1].params())
    change(params)
    with pytest.raises(WeightsError, match=named):
        engine.update_weights(params)
    assert (engine.weights_version, engine.weights_digest) == (0, digest)
    assert_trainer_agrees(policies[0], generate(engine))


def test_a_running_request_goes_on_under_the_new_weights(engine, policies):
    engine.enqueue(prompts(30, seed=44), sample(max_tokens=40), use_tqdm=False)
    for _ in range(12):
        engine.llm_engine.step()
    engine.update_weights(policies[1])
    [output] = engine.wait_for_completion(use_tqdm=False)
    batch = tokens_and_logprobs([output])
    versions = batch["weights_version"][0, 30:]
    assert set(versions) == {0, 1}
    old, new = (trainer_scores(m, [sequence(output, output.outputs[0])], 0.8)[0][29:] for m in policies)
    np.testing.assert_array_equal(sampled(output.outputs[0]), np.where(versions == 0, old, new))


def test_vllms_protocol_takes_parts_and_closes_only_when_all_came(engine, policies):
    params = policies[1].params()
    engine.init_weight_transfer_engine({"init_info": {}})
    engine.start_weight_update()
    engine.update_weights({"update_info": {"params": {"layers": params["layers"]}}})
    with pytest.raises(WeightsError, match="embed_tokens is missing"):
        engine.finish_weight_update()
    assert engine.weights_version == 0
    engine.start_weight_update()
    engine.update_weights({"update_info": {"params": {"layers": params["layers"]}}})
    engine.update_weights({"update_info": {"params": {k: v for k, v in params.items() if k != "layers"}}})
    engine.finish_weight_update()
    assert engine.weights_version == 1
    assert engine.get_weight_version() == "1"
    assert_trainer_agrees(policies[1], generate(engine))


def test_vllms_protocol_takes_a_checkpoint(engine, policies, tmp_path):
    export(tmp_path / "new", policies[1].params(), policies[1].config)
    engine.start_weight_update()
    engine.update_weights({"update_info": {"path": str(tmp_path / "new")}})
    engine.finish_weight_update()
    assert engine.weights_version == 1
    assert [o.num_cached_tokens for o in generate(engine)] == [0, 0]


@pytest.mark.parametrize("info", [{}, {"params": {}, "path": "x"}, {"names": ["a"]}])
def test_vllms_protocol_refuses_what_it_does_not_know(engine, info):
    engine.start_weight_update()
    with pytest.raises(WeightsError, match="update_info"):
        engine.update_weights({"update_info": info})


def test_parts_without_a_start_are_refused(engine, policies):
    with pytest.raises(WeightsError, match="start_weight_update"):
        engine.update_weights({"update_info": {"params": policies[1].params()}})
    with pytest.raises(WeightsError, match="start_weight_update"):
        engine.finish_weight_update()


def test_b065_sleep_gives_everything_back(engine, policies):
    before = generate(engine)
    engine.sleep(level=1)
    engine.wake_up()
    after = generate(engine)
    assert [o.num_cached_tokens for o in after] == [0, 0]
    assert_same_samples(before, after)


def test_b095_dropped_weights_must_come_back_before_anything_is_generated(engine, policies):
    engine.sleep(level=2)
    with pytest.raises(WeightsError, match="update_weights"):
        engine.wake_up()
    engine.wake_up(tags=["weights"])
    with pytest.raises(WeightsError, match="update_weights"):
        engine.wake_up(tags=["kv_cache"])
    engine.update_weights(policies[1])
    engine.wake_up(tags=["kv_cache"])
    assert_trainer_agrees(policies[1], generate(engine))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_sleeping_engine_refuses_to_generate(engine, policies, level):
    engine.sleep(level=level)
    with pytest.raises(WeightsError, match="wake_up"):
        generate(engine)
    assert not engine.llm_engine.has_unfinished_requests()


def test_an_update_in_sleep_counts_after_it(engine, policies):
    engine.sleep(level=1)
    engine.wake_up(tags=["weights"])
    engine.update_weights(policies[1])
    engine.wake_up()
    assert_trainer_agrees(policies[1], generate(engine))


def test_b092_a_tied_head_follows_the_embedding():
    tied = policy(tie_word_embeddings=True)
    llm = start(tied)
    assert_trainer_agrees(tied, generate(llm))
    moved = policy(tie_word_embeddings=True)
    moved.weights["embed_tokens"][...] = jax.numpy.flip(tied.params()["embed_tokens"], 0)
    llm.update_weights(moved)
    outputs = generate(llm)
    assert_trainer_agrees(moved, outputs)
    with pytest.raises(AssertionError):
        assert_trainer_agrees(tied, outputs)
    llm.close()


def test_b092_an_untied_head_does_not(engine, policies):
    moved = policy(0)
    moved.weights["embed_tokens"][...] = jax.numpy.flip(policies[0].params()["embed_tokens"], 0)
    engine.update_weights(moved)
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    np.testing.assert_array_equal(worker.weights.params["lm_head"], policies[0].params()["lm_head"])
    assert_trainer_agrees(moved, generate(engine))


def test_digests_are_the_trainers(engine, policies):
    from rollout_bridge.weights import digests, total_digest

    assert engine.weights_digest == total_digest(digests(policies[0].params()))
    engine.update_weights(policies[1])
    assert engine.weights_digest == total_digest(digests(policies[1].params()))


def test_the_warm_up_compiles_for_weights_of_every_origin(policies):
    graphdef, state = nnx.split(policies[0])
    bound = nnx.merge(graphdef, jax.device_put(state, jax.devices()[0]))  # As a checkpoint is read.
    llm = start(bound, seed=3, enable_sleep_mode=True)  # A seed of its own: programs that no test met before.
    programs = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.runner.programs

    def compiled():
        return programs._forward._cache_size(), programs._sample._cache_size()

    warm = compiled()
    generate(llm)
    llm.update_weights(jax.tree.map(np.asarray, policies[1].params()))
    generate(llm)
    llm.sleep(level=1)
    llm.wake_up()
    generate(llm)
    llm.close()
    assert compiled() == warm
