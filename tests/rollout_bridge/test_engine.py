"""The real vLLM engine over a small policy: every token has the trainer's bits, whatever its company."""

import numpy as np
import pytest

from isojax.errors import IsojaxError, SamplingError
from qwen35_moe import Config, Qwen35Moe
from rollout_bridge import memory, tokens_and_logprobs
from tests.bits import bits
from tests.rollout_bridge.engines import (
    OPS,
    PAGE,
    WORDS,
    assert_same_samples,
    assert_trainer_agrees,
    policy,
    prompt_scores,
    prompts,
    sample,
    sampled,
    sequence,
    start,
    trainer_scores,
)


def test_the_engine_shares_the_policys_arrays(engine, model):
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    assert (
        worker.weights.params["embed_tokens"].unsafe_buffer_pointer()
        == model.params()["embed_tokens"].unsafe_buffer_pointer()
    )


def test_pages_get_what_programs_leave(engine, monkeypatch):
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    on_cpu = worker.determine_available_memory()
    monkeypatch.setattr(memory, "is_gpu", lambda: True)
    assert 0 < worker.determine_available_memory() < on_cpu
    monkeypatch.setattr(memory, "total_bytes", lambda: 1 << 20)
    with pytest.raises(IsojaxError, match="no memory is left for pages"):
        worker.determine_available_memory()


def test_every_token_has_the_trainers_bits(engine, model):
    outputs = engine.generate(
        prompts(1, 5, 63, 64, 65, 200, 130, 300, seed=1), sample(n=2, max_tokens=70), use_tqdm=False
    )
    assert assert_trainer_agrees(model, outputs) == 8 * 2 * 70


def test_the_comparison_sees_other_weights(engine):
    # The negative control of every test here.
    outputs = engine.generate(prompts(9, seed=2), sample(), use_tqdm=False)
    with pytest.raises(AssertionError):
        assert_trainer_agrees(policy(seed=1), outputs)


def test_b091_no_row_past_the_tokenizer_is_drawn(engine, model):
    # 20 of 320 rows of the head are padding, and vLLM takes no higher temperature: about every 16th draw would hit one.
    outputs = engine.generate(prompts(3, 30, seed=91), sample(n=8, max_tokens=60, temperature=2.0), use_tqdm=False)
    drawn = {token for output in outputs for completion in output.outputs for token in completion.token_ids}
    assert max(drawn) < WORDS
    assert len(drawn) > WORDS // 2
    assert_trainer_agrees(model, outputs)


def test_b002_company_changes_nothing(engine):
    # one row of 1, or of 64 and more, in a launch.
    alone = engine.generate(prompts(40, seed=3), sample(seed=5), use_tqdm=False)
    mates = prompts(300, 17, 1, 64, 128, 90, 33, seed=4)
    together = engine.generate([*mates, *prompts(40, seed=3)], sample(seed=5), use_tqdm=False)
    assert_same_samples(alone, together[-1:])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_b077_log_probabilities_are_of_the_distribution_that_tokens_are_drawn_from(engine, model, temperature):
    outputs = engine.generate(prompts(20, 70, seed=5), sample(temperature=temperature), use_tqdm=False)
    assert_trainer_agrees(model, outputs)


def test_greedy_tokens_are_the_likeliest_and_scored_at_temperature_1(engine, model):
    outputs = engine.generate(prompts(20, seed=6), sample(temperature=0, logprobs=1), use_tqdm=False)
    [completion] = outputs[0].outputs
    assert all(entry[token].rank == 1 for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert_trainer_agrees(model, outputs)


def test_b088_one_token_after_a_short_prompt_scores_at_the_right_place(engine, model):
    [output] = engine.generate(prompts(3, seed=7), sample(max_tokens=1), use_tqdm=False)
    [want] = trainer_scores(model, [sequence(output, output.outputs[0])], 0.8)
    assert bits(sampled(output.outputs[0])).tolist() == bits(want[2:3]).tolist()


def test_b079_scoring_a_rollout_again_gives_its_bits(engine):
    # the second path uses the temperature it is given, not one of its own.
    [output] = engine.generate(prompts(30, seed=8), sample(temperature=0.7, max_tokens=60), use_tqdm=False)
    again = {"prompt_token_ids": sequence(output, output.outputs[0])}
    [scored] = engine.generate([again], sample(temperature=0.7, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert bits(prompt_scores(scored)[29:]).tolist() == bits(sampled(output.outputs[0])).tolist()


@pytest.mark.parametrize("pages", [1, 2, 3, 4])
def test_b005_a_prefix_hit_changes_nothing(engine, model, pages):
    [prompt] = prompts(4 * PAGE + 9, seed=9)
    engine.reset_prefix_cache()
    cold = engine.generate([prompt], sample(seed=3), use_tqdm=False)
    engine.reset_prefix_cache()
    part = {"prompt_token_ids": prompt["prompt_token_ids"][: pages * PAGE + 1]}
    engine.generate([part], sample(max_tokens=1), use_tqdm=False)
    hit = engine.generate([prompt], sample(seed=3), use_tqdm=False)
    assert (cold[0].num_cached_tokens, hit[0].num_cached_tokens) == (0, pages * PAGE)
    assert_same_samples(cold, hit)
    assert_trainer_agrees(model, hit)


def test_b110_prompt_scores_do_not_miss_what_is_cached(engine, model):
    # B110, B008: more tokens than one step takes, some of them cached, beside a request that decodes.
    [prompt, mate] = prompts(200, 5, seed=10)
    asked = sample(prompt_logprobs=2, temperature=0.8)
    for _ in range(2):
        outputs = engine.generate([mate, prompt], [sample(max_tokens=30), asked], use_tqdm=False)
        [want] = trainer_scores(model, [sequence(outputs[1], outputs[1].outputs[0])], 0.8)
        assert bits(prompt_scores(outputs[1])).tolist() == bits(want[:199]).tolist()
        assert bits(sampled(outputs[1].outputs[0])).tolist() == bits(want[199:]).tolist()


def test_a_prompt_of_one_token_has_no_scores(engine):
    [output] = engine.generate(prompts(1, seed=11), sample(prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs == [None]


def test_b010_a_seed_counts_whoever_else_is_there(engine):
    alone = engine.generate(prompts(12, seed=12), sample(seed=7), use_tqdm=False)
    mixed = engine.generate(prompts(9, seed=13) + prompts(12, seed=12), [sample(), sample(seed=7)], use_tqdm=False)
    assert_same_samples(alone, mixed[1:])


def test_b011_samples_of_a_group_differ_and_the_run_repeats(engine, model):
    def run(llm):
        [output] = llm.generate(prompts(12, seed=14), sample(n=8, temperature=1.0), use_tqdm=False)
        return [tuple(c.token_ids) for c in output.outputs]

    first, second = (start(model, seed=3) for _ in range(2))
    groups = run(first), run(second)
    for llm in (first, second):
        llm.close()
    assert groups[0] == groups[1]
    assert len(set(groups[0])) > 1
    assert run(engine) != groups[0]  # Another engine seed.


def test_the_samples_of_one_seed_differ_and_do_not_overlap_with_the_next_seed(engine):
    [seven] = engine.generate(prompts(12, seed=15), sample(n=2, seed=7), use_tqdm=False)
    [eight] = engine.generate(prompts(12, seed=15), sample(n=2, seed=8), use_tqdm=False)
    drawn = [tuple(c.token_ids) for c in (*seven.outputs, *eight.outputs)]
    assert len(set(drawn)) == 4


def test_b083_the_likeliest_tokens_are_listed_once_with_the_same_bits(engine, model):
    outputs = engine.generate(
        prompts(30, 31, seed=16), sample(logprobs=5, temperature=1.3, max_tokens=40), use_tqdm=False
    )
    inside = outside = 0
    for output in outputs:
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            values = [x.logprob for x in entry.values()]
            among = entry[token].rank <= 5
            assert len(entry) == (5 if among else 6)
            best = sorted(values, reverse=True)[:5]
            assert best == (sorted(values, reverse=True) if among else sorted(values[1:], reverse=True))
            inside, outside = inside + among, outside + (not among)
    assert inside
    assert outside
    assert_trainer_agrees(model, outputs)


def test_truncated_sampling_draws_what_it_keeps(engine):
    asked = sample(top_k=3, temperature=1.5, logprobs=5, max_tokens=30)
    [output] = engine.generate(prompts(30, seed=17), asked, use_tqdm=False)
    [completion] = output.outputs
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank <= 3
        assert np.isfinite(entry[token].logprob)
        kept = [x.logprob for x in entry.values() if np.isfinite(x.logprob)]
        assert np.isclose(np.exp(kept).sum(), 1, atol=1e-5)  # Renormalised over what is kept.


def test_a_plain_request_keeps_its_bits_beside_a_truncated_one(engine):
    alone = engine.generate(prompts(18, seed=18), sample(seed=2), use_tqdm=False)
    options = [sample(seed=2), sample(top_p=0.5), sample(logit_bias={5: 3.0}), sample(logprobs=4)]
    mixed = engine.generate(prompts(18, seed=18) + prompts(7, 8, 9, seed=19), options, use_tqdm=False)
    assert_same_samples(alone, mixed[:1])


def test_edits_of_logits_do_what_they_say(engine):
    stop = list(range(0, 320, 2))
    options = [
        sample(allowed_token_ids=[7, 9], max_tokens=20),
        sample(logit_bias={11: 100.0}, max_tokens=5),
        sample(min_tokens=6, max_tokens=20, stop_token_ids=stop),
    ]
    allowed, biased, long = engine.generate(prompts(5, 6, 7, seed=20), options, use_tqdm=False)
    assert set(allowed.outputs[0].token_ids) <= {7, 9}
    assert list(biased.outputs[0].token_ids) == [11] * 5
    tokens = long.outputs[0].token_ids
    assert len(tokens) > 6
    assert not set(tokens[:6]) & set(stop)


def test_b085_a_nan_logit_fails_the_call_and_the_engine_goes_on(engine, model):
    params = model.params()
    broken = {**params, "lm_head": params["lm_head"].at[3, 0].set(np.nan)}
    engine.update_weights(broken)
    with pytest.raises(SamplingError, match="NaN"):
        engine.generate(prompts(9, 10, seed=21), sample(), use_tqdm=False)
    with pytest.raises(SamplingError, match="NaN"):
        engine.generate(prompts(90, seed=21), sample(prompt_logprobs=0, temperature=1.0), use_tqdm=False)
    engine.update_weights(model)
    outputs = engine.generate(prompts(9, 10, seed=21), sample(), use_tqdm=False)
    assert_trainer_agrees(model, outputs)


def test_outputs_become_a_batch(engine, model):
    outputs = engine.generate(prompts(9, 70, seed=22), sample(n=2, temperature=0.9), use_tqdm=False)
    batch = tokens_and_logprobs(outputs)
    rows = [sequence(o, c) for o in outputs for c in o.outputs]
    assert [batch["tokens"][b, :n].tolist() for b, n in enumerate(batch["lengths"])] == rows
    want = trainer_scores(model, rows, 0.9)
    for b, scores in enumerate(want):
        mask = batch["mask"][b, 1 : batch["lengths"][b]]
        got = batch["rollout_logprobs"][b, 1 : batch["lengths"][b]][mask]
        assert bits(got).tolist() == bits(scores[mask]).tolist()
    assert set(batch["weights_version"][batch["mask"]]) == {engine.weights_version}
    assert batch["temperature"].tolist() == [np.float32(0.9)] * 4


@pytest.mark.parametrize("options", [{"presence_penalty": 0.5}, {"bad_words": ["x"]}, {"max_tokens": None}])
def test_what_is_not_served_is_refused_before_anything_runs(engine, options):
    with pytest.raises(SamplingError, match=next(iter(options))):
        engine.generate(prompts(5, seed=23), sample(**options), use_tqdm=False)
    assert not engine.llm_engine.has_unfinished_requests()


def test_sampling_parameters_and_beams_are_refused_by_name(engine):
    with pytest.raises(SamplingError, match="sampling_params"):
        engine.generate(prompts(5, seed=24), use_tqdm=False)
    with pytest.raises(SamplingError, match="beam"):
        engine.beam_search(prompts(5, seed=24), None)


def test_a_multimodal_checkpoint_is_served_for_its_text(model):
    text = model.config.to_hf()
    outer = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": False,
    }
    wrapped = Qwen35Moe(Config.from_hf(outer, compute_dtype="float32"), model.params(), OPS)
    llm = start(wrapped)
    outputs = llm.generate(prompts(70, seed=25), sample(), use_tqdm=False)
    llm.close()
    assert_trainer_agrees(wrapped, outputs)
