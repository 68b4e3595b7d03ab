import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.l2_norm import l2_norm, reference
from pallas_kernels.rows import row_op
from tests.bits import assert_bit_equal, differing


def heads_of(rows, heads, width, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, heads, width)), dtype)


@functools.partial(jax.jit, static_argnums=2)
def with_gradient(x, cotangent, op=functools.partial(l2_norm, scale=0.25)):
    out, pull = jax.vjp(op, x)
    return out, pull(cotangent)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [32, 96])
def test_a_head_and_a_row_keep_their_bits_in_any_company(width, dtype):
    x, cotangent = heads_of(128, 8, width, dtype), heads_of(128, 8, width, dtype, seed=1)
    want = with_gradient(x, cotangent)
    for rows, heads in ((128, 1), (7, 3)):
        part = np.s_[:rows, :heads]
        assert_bit_equal(with_gradient(x[part], cotangent[part]), tuple(w[part] for w in want))


def test_a_sum_left_to_the_compiler_depends_on_the_number_of_heads():
    stock = row_op("stock", functools.partial(reference.l2_norm, scale=0.25))
    x = heads_of(64, 8, 16)
    assert differing(with_gradient(x[:, :1], x[:, :1], stock)[0], with_gradient(x, x, stock)[0][:, :1])


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float32", 1e-6)])
def test_values_and_gradients_agree_with_float64(dtype, tolerance):
    x, cotangent = heads_of(70, 3, 32, dtype), heads_of(70, 3, 32, dtype, seed=1)
    got = with_gradient(x, cotangent)
    with jax.enable_x64(True):

        def definition(x):
            return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) * 0.25

        out, pull = jax.vjp(definition, x.astype(jnp.float64))
        want = out, pull(cotangent.astype(jnp.float64))[0]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_b068_zero_rows_stay_zero_and_have_finite_gradients(dtype):
    """B068: pad rows are all zero; x / |x| without the epsilon under the root has no gradient there."""
    x, cotangent = heads_of(70, 3, 32, dtype).at[64:].set(0), heads_of(70, 3, 32, dtype, seed=1)
    out, grad = with_gradient(x, cotangent.at[65:].set(0))
    assert not np.asarray(out[64:], np.float32).any()
    assert np.isfinite(np.asarray(grad, np.float32)).all()
    assert not np.asarray(grad[65:], np.float32).any()
