import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from isojax.bits import assert_bit_equal
from isojax.rl.advantages import group_advantages, whiten

rewards = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-2, 2, width=32))


@given(rewards)
def test_a_group_has_the_advantages_it_has_alone(values):
    together = group_advantages(values)
    alone = np.concatenate([group_advantages(row[None]) for row in values])
    assert_bit_equal(together, alone)


@given(st.floats(-2, 2, width=32), st.integers(1, 33))
def test_equal_rewards_teach_exactly_nothing(reward, samples):
    advantages = group_advantages(np.full((1, samples), reward, np.float32))
    assert_bit_equal(advantages, np.zeros((1, samples), np.float32))


@given(rewards)
def test_advantages_are_the_standard_scores_of_float64(values):
    wide = values.astype(np.float64)
    want = (wide - wide.mean(1, keepdims=True)) / (wide.std(1, keepdims=True) + 1e-6)
    spread = wide.std(1, keepdims=True) > 1e-3
    np.testing.assert_allclose(np.where(spread, group_advantages(values), 0), np.where(spread, want, 0), atol=2e-3)


def test_without_scale_a_group_keeps_its_spread():
    advantages = group_advantages(np.array([[0, 0, 0, 1]], np.float32), scale=False)
    assert_bit_equal(advantages, np.array([[-0.25, -0.25, -0.25, 0.75]], np.float32))


def test_whiten_treats_all_values_as_one_group():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert_bit_equal(whiten(values), group_advantages(values.reshape(1, 6)).reshape(2, 3))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad):
    values = np.zeros((3, 2), np.float32)
    values[2, 1] = bad
    with pytest.raises(ValueError, match="prompt 2, sample 1"):
        group_advantages(values)
