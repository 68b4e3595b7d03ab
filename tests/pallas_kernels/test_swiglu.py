import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.swiglu import swiglu, swiglu_fused
from tests.bits import assert_bit_equal

DTYPES = ["bfloat16", "float32"]


def random_halves(rows, dtype, width=48, seed=0):
    gate_up = 3 * jax.random.normal(jax.random.key(seed), (rows, 2 * width), jnp.float32)
    return gate_up.astype(dtype)


def gradient(gate_up, cotangent):
    return jax.jit(lambda x, g: jax.vjp(swiglu_fused, x)[1](g)[0])(gate_up, cotangent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_layouts_have_one_definition(dtype):
    gate_up = random_halves(70, dtype)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    got = jax.jit(swiglu_fused)(gate_up)
    assert got.dtype == dtype
    assert_bit_equal(got, jax.jit(swiglu)(gate, up))
    g, u = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    want = g / (1 + np.exp(-g)) * u
    # Rounded once: half a unit in the last place of bfloat16.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_and_its_gradient_keep_their_bits_in_any_company(dtype):
    gate_up = random_halves(100, dtype)
    cotangent = random_halves(100, dtype, width=24, seed=1)
    want, want_grad = jax.jit(swiglu_fused)(gate_up), gradient(gate_up, cotangent)
    for rows in (1, 7, 33):
        assert_bit_equal(jax.jit(swiglu_fused)(gate_up[:rows]), want[:rows])
        assert_bit_equal(gradient(gate_up[:rows], cotangent[:rows]), want_grad[:rows])
    assert_bit_equal(jax.jit(swiglu_fused)(gate_up[::-1]), want[::-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_float64(dtype):
    gate_up, cotangent = random_halves(70, dtype), random_halves(70, dtype, width=24, seed=1)
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=-1)
    g, s = np.asarray(cotangent, np.float64), 1 / (1 + np.exp(-gate))
    want = np.concatenate([g * up * s * (1 + gate * (1 - s)), g * gate * s], -1)
    got = np.asarray(gradient(gate_up, cotangent), np.float64)
    np.testing.assert_allclose(got, want, **({"rtol": 2**-8, "atol": 1e-6} if dtype == "bfloat16" else {"atol": 1e-5}))


def test_an_odd_width_has_no_halves():
    with pytest.raises(ValueError, match="got width 7"):
        swiglu_fused(jnp.zeros((2, 7)))
