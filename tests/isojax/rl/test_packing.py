import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isojax.bits import assert_bit_equal
from isojax.errors import SamplingError, WeightsError
from isojax.layouts import CHUNK
from isojax.rl.packing import bucket, cut, pack
from isojax.sampling import Sampling
from tests.isojax.rl.outputs import completion, random_outputs, request, sampling_params


def packed(prompts=3, samples=4, max_tokens=100_000, **options):
    outputs = random_outputs(prompts, samples)
    return outputs, pack(
        outputs, np.arange(prompts * samples, dtype=np.float32).reshape(prompts, samples), max_tokens, **options
    )


def test_every_sampled_token_is_a_target_with_its_logprob_advantage_and_place():
    outputs, batch = packed()
    for number, sample in enumerate(batch.samples):
        rows = batch.sequence_rows(number)
        of_sample = np.flatnonzero(batch.mask[rows]) + rows.start
        tokens = outputs[sample.prompt].outputs[sample.sample].token_ids
        prompt = outputs[sample.prompt].prompt_token_ids
        assert batch.targets[of_sample].tolist() == tokens
        assert batch.tokens[of_sample].tolist() == [prompt[-1], *tokens[:-1]]
        assert_bit_equal(batch.rollout_logprobs[of_sample], sample.logprobs)
        assert set(batch.advantages[of_sample]) == {np.float32(sample.prompt * 4 + sample.sample)}
        assert batch.positions[of_sample].tolist() == list(range(len(prompt) - 1, len(prompt) + len(tokens) - 1))


def test_sequences_start_on_the_grid_and_nothing_lies_outside_them():
    _, batch = packed()
    starts = [batch.sequence_rows(s).start for s in range(len(batch.samples))]
    assert all(start % CHUNK == 0 for start in starts)
    assert batch.end.sum() == sum(s.length - 1 for s in batch.samples)
    there = (np.arange(CHUNK) < batch.end[:, None]).reshape(-1)
    for rows in (batch.tokens, batch.targets, batch.mask, batch.rollout_logprobs, batch.advantages):
        assert not rows[~there].any()
    assert batch.num_tokens == sum(len(s.tokens) for s in batch.samples)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 8]), st.integers(5, 40))
def test_micro_batches_are_aligned_runs_that_cover_every_sequence_once(blocks, group, most):
    micro = cut(blocks, most * CHUNK, group)
    covered = [s for m in micro for s in range(m.first, min(m.first + m.count, len(blocks)))]
    assert covered == list(range(len(blocks)))
    for m in micro:
        assert m.count & (m.count - 1) == 0
        assert m.first % m.count == 0
        assert m.first // group == (m.first + m.count - 1) // group
        rows = sum(blocks[m.first : m.first + m.count]) * CHUNK
        assert m.rows.stop - m.rows.start == rows <= most * CHUNK
        assert m.blocks * CHUNK >= rows


@given(st.integers(1, 5000))
def test_buckets_are_few_and_waste_at_most_half(blocks):
    size = bucket(blocks)
    assert blocks <= size <= max(4, blocks * 3 / 2)
    assert bucket(size) == size


@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_micro_batches_of_asked_size_hold_the_same_rows(sequences):
    _, whole = packed()
    _, parts = packed(sequences=sequences)
    assert {m.count for m in parts.micro_batches} == {sequences}
    assert_bit_equal(parts.tokens, whole.tokens)


def test_a_sequence_longer_than_max_tokens_is_refused():
    with pytest.raises(ValueError, match="raise max_tokens"):
        packed(max_tokens=64)


def test_advantages_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"advantages \[2, 2\] for 2 prompts of \[3, 3\] samples"):
        pack(random_outputs(2, 3), np.zeros((2, 2), np.float32), 4096)


def test_versions_are_kept_for_each_token():
    spans = [("0", 0, 1), ("v3", 1, 3)]
    batch = pack([request([1, 2], [completion([5, 6, 7], [-1, -1, -1], spans)])], np.ones((1, 1)), 64)
    assert batch.versions[batch.mask].tolist() == [0, 3, 3]
    assert set(batch.versions[~batch.mask]) == {-1}


@pytest.mark.parametrize("spans", [[], [("default", 0, 2)], [("3", 0, 1)]], ids=["no version", "a label", "a gap"])
def test_a_token_that_does_not_say_which_weights_drew_it_is_refused(spans):
    with pytest.raises(WeightsError, match=r"prompt 0, sample 0 .* was sampled by weights"):
        pack([request([1], [completion([5, 6], [-1, -1], spans)])], np.ones((1, 1)), 64)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_logprob_that_is_not_finite_stops_the_batch(value):
    with pytest.raises(SamplingError, match="token 6 at output position 1 has log-probability"):
        pack([request([1], [completion([5, 6], [-1, value])])], np.ones((1, 1)), 64)


def test_a_missing_logprob_is_an_error_and_not_a_zero():
    short = completion([5, 6], [-1, -1])
    short.logprobs.pop()
    with pytest.raises(SamplingError, match="2 tokens and 1 log-probabilities"):
        pack([request([1], [short])], np.ones((1, 1)), 64)


def test_another_tokens_logprob_does_not_stand_in():
    swapped = completion([5, 6], [-1, -1])
    swapped.token_ids = [5, 7]
    with pytest.raises(SamplingError, match="token 7 at output position 1 has log-probability none"):
        pack([request([1], [swapped])], np.ones((1, 1)), 64)


@pytest.mark.parametrize(("tokens", "reason"), [([], "stop"), ([5], "abort"), ([5], None)])
def test_a_completion_that_is_empty_or_unfinished_is_refused(tokens, reason):
    with pytest.raises(SamplingError, match=f"{len(tokens)} sampled tokens and ended by {reason!r}"):
        pack([request([1], [completion(tokens, [-1] * len(tokens), finish_reason=reason)])], np.ones((1, 1)), 64)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2}])
def test_what_scoring_cannot_recompute_is_refused(params):
    outputs = random_outputs(1, 1)
    outputs[0].sampling_params = sampling_params(**params)
    with pytest.raises(SamplingError):
        pack(outputs, np.ones((1, 1)), 4096)


def test_tokens_of_different_distributions_do_not_meet_in_one_batch():
    outputs = random_outputs(2, 1)
    for output, temperature in zip(outputs, (0.8, 1.0), strict=True):
        output.sampling_params = sampling_params(temperature, top_k=-1)
    with pytest.raises(SamplingError, match="different distributions"):
        pack(outputs, np.ones((2, 1)), 4096)
    with pytest.raises(SamplingError, match="different distributions"):
        pack(outputs[:1], np.ones((1, 1)), 4096, sampling=Sampling(1.0))
    assert pack(outputs[:1], np.ones((1, 1)), 4096).sampling == Sampling(0.8)
