import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.bits import assert_bit_equal
from isojax.rl.losses import TokenFields, grpo_loss


def fields(rollout, advantages, reference=None):
    values = (rollout, advantages, rollout if reference is None else reference)
    return TokenFields(*(jnp.asarray(x, jnp.float32) for x in values))


def test_on_policy_the_gradient_is_minus_the_advantage():
    logprobs = jnp.array([-0.5, -1.5, -3.0])
    advantages = jnp.array([2.0, -1.0, 0.0])
    gradient = jax.grad(lambda x: grpo_loss(x, x, fields(logprobs, advantages)).sum())(logprobs)
    assert_bit_equal(gradient, -advantages)


def test_on_policy_the_ratio_is_exactly_one():
    logprobs = jnp.asarray(-np.random.default_rng(0).random(64, np.float32) * 20)
    loss = grpo_loss(logprobs, logprobs, fields(logprobs, jnp.ones(64)))
    assert_bit_equal(loss, -jnp.ones(64))


@pytest.mark.parametrize(
    ("difference", "advantage", "gain"),
    [(1.0, 1.0, 1.28), (1.0, -1.0, -np.e), (-1.0, 1.0, 1 / np.e), (-1.0, -1.0, -0.8)],
)
def test_the_ratio_counts_only_up_to_the_clip_that_would_help(difference, advantage, gain):
    loss = grpo_loss(jnp.array([difference]), jnp.zeros(1), fields([0.0], [advantage]), clip=0.2, clip_high=0.28)
    np.testing.assert_allclose(loss, [-gain], rtol=1e-6)


def test_the_divergence_from_the_reference_is_never_negative_and_zero_at_the_reference():
    logprobs, reference = jnp.array([-1.0, -1.0, -1.0]), jnp.array([-1.0, -0.2, -3.0])
    loss = grpo_loss(logprobs, logprobs, fields(logprobs, jnp.zeros(3), reference), kl=1.0)
    np.testing.assert_allclose(loss, np.expm1([0.0, 0.8, -2.0]) - [0.0, 0.8, -2.0], rtol=1e-6)


def test_entropy_lowers_the_loss():
    with_bonus = grpo_loss(jnp.zeros(1), jnp.array([2.0]), fields([0.0], [0.0]), entropy_bonus=0.5)
    np.testing.assert_allclose(with_bonus, [-1.0])
