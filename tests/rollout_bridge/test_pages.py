"""Pages move as words, all pools alike."""

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_bridge import pages


def pools(count=40):
    words = np.arange(2 * count * 3, dtype=np.uint16).reshape(2, count, 3) + 1
    return tuple(map(jnp.asarray, words)), words


@pytest.mark.parametrize("blocks", [[3], [1, 2, 39], list(range(5, 38))])
def test_only_named_pages_are_zeroed(blocks):
    have, want = pools()
    want[:, blocks] = 0
    np.testing.assert_array_equal(np.stack(pages.zero(have, blocks)), want)


@pytest.mark.parametrize("count", [1, 16, 17])
def test_pages_are_copied_bit_for_bit(count):
    have, want = pools()
    copies = [(i, 20 + i) for i in range(1, 1 + count)]
    for source, target in copies:
        want[:, target] = want[:, source]
    np.testing.assert_array_equal(np.stack(pages.copy(have, copies)), want)


def test_half_a_float_keeps_its_bits():
    # The upper half of a float32 NaN is a signalling bfloat16 NaN, which a float copy would quiet.
    have = (jnp.full((4, 2), 0x7F81, jnp.uint16),)
    assert (np.asarray(pages.copy(have, [(1, 2)])[0]) == 0x7F81).all()
