"""Which sampling options are served; where a token's randomness comes from; edits of logits."""

import numpy as np
import pytest
from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from isojax.errors import SamplingError
from rollout_bridge.requests import Request
from rollout_bridge.sampling import Stream, controls, edits, refuse_unsupported

REFUSED = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "bad_words": ["no"],
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "logprobs": -1,
    "prompt_logprobs": 33,
    "logprob_token_ids": [1, 2],
    "extra_args": {"anything": 1},
    "thinking_token_budget": 8,
    "trace_decode_token_ids": [1],
    "watermarking": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_is_not_served_is_refused_by_name(name):
    with pytest.raises(SamplingError, match=name):
        refuse_unsupported(SamplingParams(**{name: REFUSED[name]}))


def test_all_refused_options_are_named_at_once():
    with pytest.raises(SamplingError, match=r"presence_penalty.*bad_words|bad_words.*presence_penalty"):
        refuse_unsupported(SamplingParams(presence_penalty=1.0, bad_words=["x"]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "n": 4},
        {"logprobs": 5, "stop": ["x"], "stop_token_ids": [3], "min_tokens": 2, "max_tokens": 9, "ignore_eos": True},
        {"logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2]},
        {"prompt_logprobs": 2, "temperature": 0.0},
        {"flat_logprobs": True, "logprobs": 0},
    ],
)
def test_served_options_pass(options):
    refuse_unsupported(SamplingParams(**options))


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]}]
)
def test_prompt_scores_under_a_restriction_are_refused(options):
    with pytest.raises(SamplingError, match=next(iter(options))):
        refuse_unsupported(SamplingParams(prompt_logprobs=0, **options))


def test_prompt_scores_of_cached_tokens_are_refused():
    with pytest.raises(SamplingError, match="skip_reading_prefix_cache"):
        refuse_unsupported(SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False))


def test_flat_lists_that_would_name_a_token_twice_are_refused():
    with pytest.raises(SamplingError, match="flat_logprobs"):
        refuse_unsupported(SamplingParams(flat_logprobs=True, logprobs=3))


def test_only_generation_is_served():
    with pytest.raises(SamplingError, match="PoolingParams"):
        refuse_unsupported(PoolingParams())


def test_a_sequence_is_known_by_request_and_sample_not_by_its_random_suffix():
    assert Stream.of("12-0a1b2c3d", None) == Stream.of("12-ffffffff", None) == Stream(12, 0, None)
    assert Stream.of("3_12-0a1b2c3d", None) == Stream(12, 3, None)
    assert Stream.of("cmpl-77-0-0a1b2c3d", None).request == Stream.of("cmpl-77-0-11111111", None).request
    assert Stream.of("cmpl-77-0-0a1b2c3d", None).request != Stream.of("cmpl-78-0-0a1b2c3d", None).request


def test_the_seeds_that_vllm_numbers_by_sample_are_one_seed():
    assert [Stream.of(f"{i}_5-00000000", 7 + i) for i in range(3)] == [Stream(5, i, 7) for i in range(3)]


def request(name="0-00000000", prompt=5, computed=0, **sampling) -> Request:
    return Request(name, 2, SamplingParams(**sampling), prompt, prompt, computed)


def test_controls_say_position_and_whether_a_token_is_kept():
    rows = controls([request(computed=0), request(computed=0)], [5, 3], 8, version=4, num_slots=6)
    assert rows.position[:2].tolist() == [5, 3]
    assert rows.samples[:3].tolist() == [True, False, False]
    assert rows.slot.tolist() == [2, 2] + [6] * 6
    assert int(rows.update) == 4


def test_edits_exist_only_where_asked_for():
    assert edits([request(), request()], [5, 5], 8, vocab=100) is None
    found = edits([request(), request(logit_bias={7: 1.5}), request(allowed_token_ids=[3, 4])], [5] * 3, 8, vocab=100)
    assert found is not None
    assert (found.tokens[0] == 100).all()
    assert (found.tokens[1, 0], found.add[1, 0]) == (7, 1.5)
    assert found.only.tolist() == [False, False, True] + [False] * 5


def test_stop_tokens_are_out_until_min_tokens_were_drawn():
    row = request(min_tokens=2, stop_token_ids=[9], computed=0)
    found = edits([row], [5], 8, vocab=100)
    assert found is not None
    assert (found.tokens[0, 0], found.add[0, 0]) == (9, -np.inf)
    row.computed = 6  # One token was drawn; this step draws the third.
    assert edits([row], [1], 8, vocab=100) is None


def test_a_bias_outside_the_allowed_tokens_is_no_bias():
    found = edits([request(allowed_token_ids=[3], logit_bias={3: 1.0, 8: 9.0})], [5], 8, vocab=100)
    assert found is not None
    assert found.tokens[0, :2].tolist() == [3, 100]
    assert found.add[0, 0] == 1.0
