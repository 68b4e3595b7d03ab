import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cast import cast, stock
from tests.bits import assert_bit_equal, bits, differing


def random(*shape, dtype="float32"):
    return jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (7, 33), (3, 64, 65), (70, 1024)])
def test_it_rounds_to_nearest_even_whatever_the_shape(shape):
    x = random(*shape)
    got = jax.jit(lambda x: cast(x, jnp.bfloat16))(x)
    wide = bits(x).astype(np.uint64)
    assert_bit_equal(got, ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16))


def test_down_and_up_again_rounds_inside_a_jit():
    x = random(70, 33)
    down_and_up = jax.jit(lambda x: cast(cast(x, jnp.bfloat16), jnp.float32))(x)
    assert not (bits(down_and_up) & 0xFFFF).any()
    assert differing(down_and_up, x)


def test_not_a_number_and_infinity_survive():
    x = jnp.asarray([np.nan, np.inf, -np.inf, 3.4e38, -0.0], jnp.float32)
    assert_bit_equal(cast(x, jnp.bfloat16), np.asarray(x).astype(jnp.bfloat16))


def test_the_cotangent_is_rounded_back():
    x, cotangent = random(7, 33, dtype="bfloat16"), random(7, 33) * 3
    (grad,) = jax.vjp(lambda x: cast(x, jnp.float32), x)[1](cotangent)
    assert grad.dtype == jnp.bfloat16
    assert_bit_equal(grad, cast(cotangent, jnp.bfloat16))


def test_the_dtype_it_has_already_is_no_work():
    x = random(7)
    assert cast(x, jnp.float32) is x


def test_the_stock_cast_agrees_alone():
    x = random(70, 33)
    assert_bit_equal(stock.cast(x, jnp.bfloat16), cast(x, jnp.bfloat16))
