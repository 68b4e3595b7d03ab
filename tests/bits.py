"""Comparing arrays by their bits; what floats would call equal (0 and -0) or different (NaN) does not matter."""

import jax
import numpy as np


def bits(x) -> np.ndarray:
    """The bits of `x` as unsigned integers."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_bit_equal(got, want) -> None:
    """Every bit of every leaf of two trees, and their structure."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), got, want)


def differing(a, b) -> int:
    """How many elements differ in a bit."""
    return int((bits(a) != bits(b)).sum())
