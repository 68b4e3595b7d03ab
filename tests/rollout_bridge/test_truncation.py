"""Tokens drawn with top-k, top-p and min-p: the engine returns the bits that scoring computes, mask and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isojax
from isojax.bits import assert_bit_equal
from isojax.errors import MismatchError
from isojax.rl import check_parity, gradient, pack, score
from isojax.sampling import Sampling
from isojax.scoring import score_hidden
from pallas_kernels.sample import stock
from qwen35_moe import Step, forward
from tests.bits import bits
from tests.rollout_bridge.engines import (
    OPS,
    assert_same_samples,
    config,
    prompts,
    sample,
    sampled,
    sequence,
)

KINDS = {
    "all words": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.3},
    "all three": {"top_k": 100, "top_p": 0.7, "min_p": 0.05},
}
PROMPTS = prompts(5, 63, 130, seed=80)


def params(kind: str):
    return sample(n=2, seed=3, max_tokens=24, **KINDS[kind])


def batch_of(outputs):
    return pack(outputs, np.zeros((len(outputs), 2), np.float32), 1 << 20)


@pytest.fixture(scope="module")
def outputs(engine):
    """Requests of all kinds, which share steps."""
    asked = [(prompt, params(kind)) for prompt in PROMPTS for kind in KINDS]
    found = engine.generate([prompt for prompt, _ in asked], [p for _, p in asked], use_tqdm=False)
    return {kind: found[i :: len(KINDS)] for i, kind in enumerate(KINDS)}


@jax.jit
def hidden_of(params, tokens, chunks):
    return forward(params, Step(tokens, None, chunks), config(), OPS)[0]


@pytest.fixture(scope="module")
def rescored(outputs, model):
    """Scores the batch of a kind as the trainer does; one program serves the hidden rows of all kinds."""

    def rescored(kind, sampling=None, ops=OPS):
        batch = batch_of(outputs[kind])
        (micro,) = batch.micro_batches
        rows = gradient._device_rows(batch, micro)
        hidden = hidden_of(model.params(), rows.tokens, rows.chunks)
        last = jax.jit(score_hidden, static_argnames=("config", "ops", "sampling"))
        sampling = sampling or batch.sampling
        scores, _ = last(model.params(), hidden, rows.targets, config=model.config, ops=ops, sampling=sampling)
        return batch, np.asarray(scores)[: len(batch.tokens)]

    return rescored


@pytest.mark.parametrize("kind", KINDS)
def test_b080_every_drawn_token_has_the_trainers_bits_in_the_distribution_it_was_drawn_from(kind, rescored):
    batch, logprobs = rescored(kind)
    assert batch.sampling == Sampling(0.8, **KINDS[kind])
    parity = check_parity(batch, logprobs)
    assert (parity.compared, parity.different, parity.ratio_max_abs_minus_1) == (len(PROMPTS) * 2 * 24, 0, 0.0)
    assert np.isfinite(logprobs[batch.mask]).all()


def test_the_score_of_a_batch_is_that_of_its_distribution(rescored, model):
    batch, logprobs = rescored("all three")
    assert_bit_equal(score(model, batch).logprobs, logprobs, where=batch.mask)


def test_b080_logprobs_of_given_tokens_are_those_that_the_engine_returned(outputs, model):
    rows = [(output, completion) for output in outputs["all three"] for completion in output.outputs]
    lengths = np.array([len(sequence(*row)) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for ids, row in zip(tokens, rows, strict=True):
        ids[: len(sequence(*row))] = sequence(*row)
    score_all = jax.jit(lambda t, n: isojax.logprobs(model, t, n, temperature=0.8, **KINDS["all three"]))
    found = np.asarray(score_all(jnp.asarray(tokens), jnp.asarray(lengths)))
    for values, length, (_, completion) in zip(found, lengths, rows, strict=True):
        assert bits(values[length - 24 : length]).tolist() == bits(sampled(completion)).tolist()


def test_company_of_other_settings_changes_no_bit(engine, outputs):
    for kind in ("all words", "top_p"):
        assert_same_samples(engine.generate(PROMPTS, params(kind), use_tqdm=False), outputs[kind])


def test_the_whole_distribution_on_one_side_is_off_by_the_mass_left_out_and_refused(rescored, tmp_path):
    """The ratio of trl#6789."""
    batch, whole = rescored("top_p", Sampling(0.8))
    ratio = np.exp(whole[batch.mask] - batch.rollout_logprobs[batch.mask])
    assert 0.89 < ratio.min() <= ratio.max() < 0.93
    with pytest.raises(MismatchError):
        check_parity(batch, whole, directory=tmp_path)


def test_another_mask_on_one_side_is_refused(rescored, tmp_path):
    def narrower(logits, *, top_p, **settings):
        return stock.truncation_mask(logits, top_p=top_p - 0.01, **settings)

    batch, logprobs = rescored("top_p", ops=OPS.replace(truncation_mask=narrower))
    with pytest.raises(MismatchError):
        check_parity(batch, logprobs, directory=tmp_path)
