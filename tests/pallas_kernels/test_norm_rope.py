import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm_rope import norm_rope, rotary_tables
from tests.bits import assert_bit_equal


@pytest.mark.parametrize("half", [2, 4, 8, 16])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_row_keeps_its_bits_wherever_it_stands_in_a_block(heads, half):
    # Parts of a head narrower than a vector register: a product that contracts in some lanes shows here.
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((130, heads, 8 * half)), jnp.float32)
    scale = jnp.asarray(0.1 * rng.standard_normal(8 * half), jnp.float32)
    cos, sin = (jnp.asarray(table)[:130] for table in rotary_tables(256, 2 * half, 1e7))
    op = jax.jit(norm_rope)
    whole = op(x, scale, cos, sin)
    for begin, end in ((0, 1), (28, 36), (63, 65), (64, 128), (129, 130)):
        assert_bit_equal(op(x[begin:end], scale, cos[begin:end], sin[begin:end]), whole[begin:end])
