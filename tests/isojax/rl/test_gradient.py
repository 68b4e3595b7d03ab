import functools

import jax
import numpy as np
import pytest
from flax import nnx

from isojax.bits import assert_bit_equal, compare_bits
from isojax.rl import gradient
from isojax.rl.gradient import policy_gradient, score
from isojax.rl.losses import grpo_loss
from isojax.rl.packing import pack
from isojax.sampling import Sampling
from tests.isojax.rl.outputs import random_outputs
from tests.isojax.rl.policies import bigram, score_rows

PROMPTS, SAMPLES = 5, 4  # Twenty sequences: two gradient groups and a half.
ADVANTAGES = np.random.default_rng(1).standard_normal((PROMPTS, SAMPLES)).astype(np.float32)


@pytest.fixture(autouse=True)
def _small_policy(monkeypatch):
    monkeypatch.setattr(gradient, "score_rows", score_rows)


def batch(sequences=None, **options):
    return pack(random_outputs(PROMPTS, SAMPLES), ADVANTAGES, 1 << 20, sequences=sequences, **options)


def arrays(grads):
    return nnx.to_pure_dict(grads)["weights"]


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient, "score_rows", score_rows)
        return policy_gradient(bigram(), batch())


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_the_micro_batch_changes_no_bit_of_gradient_loss_or_logprobs(whole, sequences):
    grads, scores = policy_gradient(bigram(), batch(sequences))
    assert_bit_equal(arrays(grads), arrays(whole[0]))
    assert scores.loss == whole[1].loss
    mask = batch().mask
    assert_bit_equal(scores.logprobs, whole[1].logprobs, where=mask)
    assert_bit_equal(scores.entropy, whole[1].entropy, where=mask)


def test_scoring_alone_gives_the_bits_of_the_gradients_forward(whole):
    assert_bit_equal(score(bigram(), batch()).logprobs, whole[1].logprobs, where=batch().mask)


def test_the_order_of_groups_is_part_of_the_numerics(whole):
    other, _ = policy_gradient(bigram(), batch(group=4))
    assert compare_bits(arrays(other), arrays(whole[0])).different > 0


def test_the_gradient_is_that_of_plain_jax(whole):
    grads, scores = whole
    rows = batch()

    def loss(params):
        x = params["embed"][rows.tokens]
        x = x / jax.numpy.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + params["norm"])
        logprobs = jax.nn.log_softmax(x @ params["head"].T)[np.arange(len(rows.tokens)), rows.targets]
        terms = -jax.numpy.exp(logprobs - rows.rollout_logprobs) * rows.advantages
        clipped = -jax.numpy.clip(jax.numpy.exp(logprobs - rows.rollout_logprobs), 0.8, 1.2) * rows.advantages
        return jax.numpy.sum(jax.numpy.where(rows.mask, jax.numpy.maximum(terms, clipped), 0)) / rows.num_tokens

    value, want = jax.value_and_grad(loss)(bigram().params())
    assert scores.loss == pytest.approx(float(value), rel=0.05)
    for name, got in arrays(grads).items():
        cosine = np.vdot(got, want[name]) / np.linalg.norm(got) / np.linalg.norm(want[name])
        assert cosine > 0.99, name


def test_temperature_is_that_of_the_rollout():
    sampled, plain = (
        score(bigram(), batch(sampling=sampling)).logprobs[batch().mask] for sampling in (Sampling(0.7), Sampling())
    )
    assert compare_bits(sampled, plain).different > len(plain) / 2


def test_partials_of_one_loss_compile_once():
    before = gradient._micro_gradient._cache_size()
    for _ in range(2):
        policy_gradient(bigram(), batch(), functools.partial(grpo_loss, clip=0.3))
    assert gradient._micro_gradient._cache_size() - before <= len({m.blocks for m in batch().micro_batches})


def test_native_numerics_move_with_the_micro_batch():
    whole, parts = (policy_gradient(bigram("native"), batch(n))[0] for n in (8, 1))
    assert compare_bits(arrays(parts), arrays(whole)).different > 0
