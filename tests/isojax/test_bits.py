"""Bits are compared as patterns, and a difference says where it is."""

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isojax.bits import assert_bit_equal, compare_bits
from isojax.errors import MismatchError


def next_bits(x: np.ndarray, index) -> np.ndarray:
    """`x` with the lowest bit of one element flipped."""
    changed = x.copy()
    view = changed.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])
    view[index] ^= 1
    return changed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_one_flipped_bit_is_one_difference_at_its_index(dtype):
    x = np.linspace(1, 2, 12).reshape(3, 4).astype(jnp.dtype(dtype))
    comparison = compare_bits(x, next_bits(x, (2, 1)))
    assert str(comparison) == "12 compared, 1 different"
    assert comparison.first.index == (2, 1)
    assert comparison.max_abs_difference > 0


@settings(max_examples=50, deadline=None)
@given(arrays.arrays(np.uint32, st.integers(0, 20)))
def test_every_pattern_equals_itself_nan_included(patterns):
    x = patterns.view(np.float32)
    assert str(compare_bits(x, x.copy())) == f"{x.size} compared, 0 different"


def test_zeros_of_two_signs_and_nans_of_two_patterns_differ():
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert compare_bits(np.float32([0.0]), np.float32([-0.0])).different == 1
    assert compare_bits(nan[:1], nan[1:]).different == 1
    assert compare_bits(nan, nan).different == 0


def test_a_mask_chooses_what_is_compared():
    x = np.zeros((2, 3), np.float32)
    y = next_bits(x, (1, 2))
    mask = np.array([[1, 1, 1], [1, 1, 0]], np.float32)
    assert str(compare_bits(x, y, where=mask)) == "5 compared, 0 different"
    assert str(compare_bits(x, y, where=np.array([False, False, True]))) == "2 compared, 1 different"


def test_trees_are_compared_by_name():
    tree = {"b": jnp.ones(3), "a": (jnp.zeros(2, jnp.int32), True)}
    same = {"a": (jnp.zeros(2, jnp.int32), True), "b": jnp.ones(3)}
    assert str(compare_bits(tree, same)) == "6 compared, 0 different"
    same["b"] = same["b"].at[1].set(2.0)
    comparison = compare_bits(tree, same)
    assert (comparison.first.leaf, comparison.first.index) == ("b", (1,))


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (np.zeros(2, np.float32), np.zeros(3, np.float32), r"float32\[2\] and float32\[3\]"),
        (np.zeros(2, np.float32), np.zeros(2, np.float64), r"float32\[2\] and float64\[2\]"),
        ({"a": np.zeros(2)}, {"b": np.zeros(2)}, "only one side has a, b"),
        (np.zeros(2, np.complex64), np.zeros(2, np.complex64), "no integer view of complex64"),
        (np.array(["a"]), np.array(["a"]), "no array of numbers"),
    ],
)
def test_what_has_no_common_bits_is_refused(a, b, why):
    with pytest.raises(ValueError, match=why):
        compare_bits(a, b)


def test_the_error_names_count_place_values_and_patterns():
    x = np.full((2, 3), -0.69314718, np.float32)
    comparison = compare_bits(x, next_bits(x, (1, 2)))
    with pytest.raises(MismatchError) as error:
        comparison.raise_if_different(
            "no update was applied",
            noun="log-probabilities",
            sides=("rollout", "trainer"),
            locate=lambda index: f"request {index[0]}, position {index[1]}",
            notes=["reproduce: isojax diff runs/x/mismatch_0012.npz"],
        )
    first, second, third = str(error.value).splitlines()
    assert first == "1 of 6 log-probabilities differ; no update was applied."
    assert second == (
        "  request 1, position 2: rollout -0.693147182 (bf317218), trainer -0.693147242 (bf317219);"
        " largest difference 5.96e-08"
    )
    assert third == "  reproduce: isojax diff runs/x/mismatch_0012.npz"
    assert error.value.exit_code == 1


def test_equal_bits_raise_nothing_and_comparing_nothing_does():
    x = np.ones(3, np.float32)
    compare_bits(x, x).raise_if_different()
    nothing = compare_bits(x, x, where=np.zeros(3, bool))
    with pytest.raises(MismatchError, match="0 values were compared"):
        nothing.raise_if_different()
    nothing.raise_if_different(allow_empty=True)


def test_a_difference_to_nan_is_infinitely_large_and_still_json():
    plain = compare_bits(np.float32([np.nan]), np.float32([1.0])).to_json()
    assert plain["max_abs_difference"] == "inf"
    assert plain["first"]["values"] == ["nan", "1.0"]


def test_assert_bit_equal_fails_on_one_bit():
    x = jnp.arange(4.0)
    assert_bit_equal(x, np.arange(4, dtype=np.float32))
    assert_bit_equal(jnp.zeros((0, 3)), jnp.zeros((0, 3)))
    with pytest.raises(AssertionError, match=r"1 of 4 values differ(.|\n)*\[2\]: actual 2"):
        assert_bit_equal(x, jnp.asarray(next_bits(np.asarray(x), 2)))
    assert_bit_equal(jax.random.key(1), jax.random.key(1))
