"""However vLLM cuts, orders, pre-empts and caches: the same bits."""

import numpy as np
import pytest

from tests.bits import bits
from tests.rollout_bridge.engines import (
    PAGE,
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


def scores(outputs):
    return [(prompt_scores(o).tobytes(), sampled(o.outputs[0]).tobytes()) for o in outputs]


@pytest.mark.parametrize("rivals", [0, 3])
@pytest.mark.parametrize("budget", [64, 100, 256])
def test_b004_token_budgets_and_rivals_move_chunk_edges_and_no_bit(model, budget, rivals):
    llm = start(model, max_num_batched_tokens=budget)
    company = prompts(40, 90, 3, seed=30)[:rivals]
    asked = sample(seed=1, prompt_logprobs=0)
    outputs = llm.generate(
        [*company, *prompts(300, seed=31)], [sample(max_tokens=20)] * rivals + [asked], use_tqdm=False
    )
    llm.close()
    [want] = trainer_scores(model, [sequence(outputs[-1], outputs[-1].outputs[0])], 0.8)
    assert bits(prompt_scores(outputs[-1])).tolist() == bits(want[:299]).tolist()
    assert_trainer_agrees(model, outputs)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"async_scheduling": False}, id="synchronous"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
        pytest.param({"max_num_seqs": 3}, id="three at a time"),
    ],
)
def test_scheduling_options_change_nothing(model, options):
    llm = start(model, **options)
    for _ in range(2):  # The second time from the prefix cache, if there is one.
        outputs = llm.generate(prompts(1, 64, 65, 200, 130, seed=32), sample(n=2, max_tokens=30), use_tqdm=False)
        assert_trainer_agrees(model, outputs)
    llm.close()


def counted_preemptions(llm) -> list[str]:
    """Says of every request that loses its pages from now on whether it was in its prompt or after it."""
    scheduler, lost = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counting(request, *args, **kwargs):
        lost.append("prompt" if request.num_computed_tokens < request.num_prompt_tokens else "after")
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counting
    return lost


def test_b061_pre_empted_requests_go_on_as_if_nothing_was(model):
    # pages and slots are given to others meanwhile.
    llm = start(model)
    alone = [llm.generate([p], sample(seed=4, max_tokens=110), use_tqdm=False)[0] for p in prompts(*[190] * 8, seed=33)]
    llm.reset_prefix_cache()
    lost = counted_preemptions(llm)
    crowded = llm.generate(prompts(*[190] * 8, seed=33), sample(seed=4, max_tokens=110), use_tqdm=False)
    llm.close()
    assert lost
    assert_same_samples(alone, crowded)
    assert_trainer_agrees(model, crowded)


@pytest.mark.parametrize(
    ("place", "length", "options"),
    [
        ("prompt", 330, {"long_prefill_token_threshold": 64, "scheduler_reserve_full_isl": False}),
        ("after", 190, {}),
    ],
)
def test_b007_prompt_scores_survive_a_pre_emption(model, place, length, options):
    llm = start(model, max_num_batched_tokens=256, **options)
    lost = counted_preemptions(llm)
    asked = sample(seed=4, max_tokens=110, prompt_logprobs=0)
    outputs = llm.generate(prompts(*[length] * 8, seed=34), asked, use_tqdm=False)
    llm.close()
    assert place in lost
    want = trainer_scores(model, [sequence(o, o.outputs[0]) for o in outputs], 0.8)
    for output, row in zip(outputs, want, strict=True):
        assert bits(prompt_scores(output)).tolist() == bits(row[: length - 1]).tolist()
        assert bits(sampled(output.outputs[0])).tolist() == bits(row[length - 1 :]).tolist()


def test_hits_inside_a_long_page_are_copies_of_it(model):
    # Prefixes match by 64 tokens, pages are 128 long: vLLM copies the page before it is written on.
    llm = start(model, block_size=2 * PAGE, prefix_match_unit=PAGE, num_gpu_blocks_override=40)
    [prompt, tail] = prompts(3 * PAGE + 5, 80, seed=35)
    first = llm.generate([prompt], sample(seed=6, max_tokens=70), use_tqdm=False)
    forked = {"prompt_token_ids": prompt["prompt_token_ids"][: 3 * PAGE] + tail["prompt_token_ids"]}
    hits = llm.generate([prompt, forked], sample(seed=6, max_tokens=70), use_tqdm=False)
    llm.close()
    assert [o.num_cached_tokens for o in hits] == [3 * PAGE, 3 * PAGE]
    assert_same_samples(first, hits[:1])
    assert_trainer_agrees(model, hits)


def test_bfloat16_moves_through_the_same_pages():
    # Half of a float32 state can look like a bfloat16 NaN: states move as integers.
    model = policy(compute_dtype="bfloat16")
    llm = start(model)
    for _ in range(2):
        outputs = llm.generate(prompts(5, 64, 200, 130, seed=36), sample(n=2, max_tokens=70), use_tqdm=False)
        assert_trainer_agrees(model, outputs)
    assert np.any([o.num_cached_tokens for o in outputs])
    llm.close()
