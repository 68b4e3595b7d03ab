"""What a training step gets of an engine's outputs: ids and bits as they came, or an error."""

import math

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

from isojax.errors import SamplingError, WeightsError
from rollout_bridge import tokens_and_logprobs


def completion(tokens, logprobs=None, *, index=0, version="3", finish="stop", flat=False):
    values = [-0.5 * (i + 1) for i in range(len(tokens))] if logprobs is None else logprobs
    entries = FlatLogprobs() if flat else []
    for token, value in zip(tokens, values, strict=False):
        entries.append({} if value is None else {token: Logprob(value, rank=1)})
    spans = [WeightVersionSpan(version, 0, len(tokens))] if version else None
    return CompletionOutput(index, "", tokens, 0.0, entries, finish_reason=finish, weight_versions=spans)


def output(*completions, prompt=(11, 12, 13), sampling=None, name="0"):
    out = RequestOutput(name, None, list(prompt), None, list(completions), finished=True)
    out.sampling_params = SamplingParams(max_tokens=8) if sampling is None else sampling
    return out


def test_b088_the_first_sampled_token_follows_the_prompt():
    # one shift, not two.
    batch = tokens_and_logprobs([output(completion([21], [-1.25]))])
    assert batch["tokens"].tolist() == [[11, 12, 13, 21]]
    assert batch["mask"].tolist() == [[False, False, False, True]]
    assert batch["rollout_logprobs"][0, 3] == np.float32(-1.25)
    assert batch["weights_version"].tolist() == [[-1, -1, -1, 3]]


@pytest.mark.parametrize("flat", [False, True])
def test_rows_are_padded_and_values_keep_their_bits(flat):
    value = float(np.float32(-0.69314718))
    outs = [
        output(completion([1, 2], [value, -3.0], flat=flat), completion([4], index=1, flat=flat)),
        output(completion([5, 6, 7]), prompt=(9,)),
    ]
    batch = tokens_and_logprobs(outs)
    assert batch["tokens"].tolist() == [[11, 12, 13, 1, 2], [11, 12, 13, 4, 0], [9, 5, 6, 7, 0]]
    assert batch["lengths"].tolist() == [5, 4, 4]
    assert batch["prompt_lengths"].tolist() == [3, 3, 1]
    assert batch["prompt"].tolist() == [0, 0, 1]
    assert batch["rollout_logprobs"].dtype == np.float32
    assert batch["rollout_logprobs"][0, 3].view(np.uint32) == np.float32(value).view(np.uint32)


def test_b107_ids_that_no_tokenizer_would_give_back_are_used_as_given():
    # nothing here decodes or encodes.
    batch = tokens_and_logprobs([output(completion([5, 5, 0, 4_000_000]))])
    assert batch["tokens"][0, 3:].tolist() == [5, 5, 0, 4_000_000]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_b085_a_logprob_that_is_no_number_is_an_error(value):
    # not None, not 0, not dropped.
    with pytest.raises(SamplingError, match="token 2 at output position 1"):
        tokens_and_logprobs([output(completion([1, 2], [-1.0, value]))])


def test_b086_a_missing_logprob_is_an_error():
    # neither a hole nor a short list is filled in.
    with pytest.raises(SamplingError, match="position 1"):
        tokens_and_logprobs([output(completion([1, 2], [-1.0, None]))])
    with pytest.raises(SamplingError, match="3 tokens and 2"):
        tokens_and_logprobs([output(completion([1, 2, 3], [-1.0, -1.0]))])


def test_an_unfinished_or_empty_sample_is_an_error():
    with pytest.raises(SamplingError, match="abort"):
        tokens_and_logprobs([output(completion([1], finish="abort"))])
    with pytest.raises(SamplingError, match="0 sampled tokens"):
        tokens_and_logprobs([output(completion([]))])
    with pytest.raises(SamplingError, match="no outputs"):
        tokens_and_logprobs([])


def test_the_distribution_is_recorded_for_every_row():
    sampling = SamplingParams(max_tokens=8, temperature=0.6, top_k=20, top_p=0.9, min_p=0.05)
    batch = tokens_and_logprobs([output(completion([1], finish="length"), sampling=sampling)])
    assert batch["temperature"].tolist() == [np.float32(0.6)]
    assert (batch["top_k"].tolist(), batch["top_p"].tolist(), batch["min_p"].tolist()) == (
        [20],
        [np.float32(0.9)],
        [np.float32(0.05)],
    )
    assert batch["truncated"].tolist() == [True]


def test_outputs_of_another_engine_are_refused():
    out = output(completion([1]))
    del out.sampling_params
    with pytest.raises(SamplingError, match="rollout_bridge"):
        tokens_and_logprobs([out])


@pytest.mark.parametrize("options", [{"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]}, {"min_tokens": 1}])
def test_what_scoring_cannot_recompute_is_refused(options):
    with pytest.raises(SamplingError, match=next(iter(options))):
        tokens_and_logprobs([output(completion([1]), sampling=SamplingParams(max_tokens=8, **options))])


@pytest.mark.parametrize("version", [None, "my-label"])
def test_weights_without_a_version_are_refused(version):
    with pytest.raises(WeightsError, match=r"version|label"):
        tokens_and_logprobs([output(completion([1], version=version))])
