import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from isojax.layouts import Segments
from pallas_kernels.gdn_gates import gdn_gates, reference
from tests.bits import assert_bit_equal, differing


def inputs(rows, heads, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    a, b = (jnp.asarray(4 * rng.standard_normal((rows, heads)), dtype) for _ in range(2))
    A_log, dt_bias = (jnp.asarray(rng.standard_normal(heads), jnp.float32) for _ in range(2))
    return a, b, A_log, dt_bias


@jax.jit
def with_gradients(args, cotangents, segments):
    out, pull = jax.vjp(lambda *args: gdn_gates(*args, segments=segments), *args)
    return out, pull(cotangents)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_are_those_of_torch(dtype):
    a, b, A_log, dt_bias = inputs(70, 6, dtype)
    a = a.at[0].set(30.0).at[1].set(-90.0)
    wide = [torch.tensor(np.asarray(x, np.float64)) for x in (a, b, A_log, dt_bias)]
    g, beta = jax.jit(gdn_gates)(a, b, A_log, dt_bias)
    assert g.dtype == beta.dtype == jnp.float32
    want = -wide[2].exp() * torch.nn.functional.softplus(wide[0] + wide[3])
    np.testing.assert_allclose(g, want.numpy(), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(beta, torch.sigmoid(wide[1]).numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_head_and_a_row_keep_their_bits_in_any_company(dtype):
    args, cotangents = inputs(128, 16, dtype), inputs(128, 16, seed=1)[:2]
    out, grads = with_gradients(args, cotangents, Segments.one(128))
    for heads in (1, 5):
        part = tuple(x[..., :heads] for x in args)
        got = with_gradients(part, tuple(c[:, :heads] for c in cotangents), Segments.one(128))
        assert_bit_equal(got, jax.tree.map(lambda x, h=heads: x[..., :h], (out, grads)))
    for rows in (1, 7):
        assert_bit_equal(jax.jit(gdn_gates)(*(x[:rows] for x in args[:2]), *args[2:]), tuple(x[:rows] for x in out))


def test_stock_exponentials_of_odd_widths_do_not_keep_them():
    args = inputs(64, 5)
    stock = jax.jit(reference.gdn_gates)
    alone = jnp.concatenate([stock(args[0][i : i + 1], args[1][i : i + 1], *args[2:])[0] for i in range(64)])
    assert differing(alone, stock(*args)[0])


def test_gradients_agree_with_float64_and_are_finite_on_zero_rows():
    args, cotangents = inputs(192, 4), inputs(192, 4, seed=1)[:2]
    args = (args[0].at[128:].set(0), args[1].at[128:].set(0), *args[2:])
    segments = Segments(jnp.asarray([0, 0, 1]), 2)
    _, grads = with_gradients(args, cotangents, segments)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in args]

        def definition(a, b, A_log, dt_bias):
            return -jnp.exp(A_log) * jnp.logaddexp(0, a + dt_bias), jax.nn.sigmoid(b)

        want = jax.vjp(definition, *wide)[1](tuple(c.astype(jnp.float64) for c in cotangents))
    for got, exact in zip(grads, want, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, exact, rtol=3e-5, atol=1e-5 * np.abs(exact).max())


def test_gradients_of_a_batch_fold_those_of_its_sequences():
    args, cotangents = inputs(192, 4), inputs(192, 4, seed=1)[:2]
    whole = with_gradients(args, cotangents, Segments(jnp.asarray([0, 0, 1]), 2))[1]
    parts = []
    for rows in (slice(0, 128), slice(128, 192)):
        own = (*(x[rows] for x in args[:2]), *args[2:])
        parts.append(with_gradients(own, tuple(c[rows] for c in cotangents), Segments.one(rows.stop - rows.start))[1])
    assert_bit_equal(whole[2:], jax.jit(lambda a, b: (a[0] + b[0], a[1] + b[1]))(*(p[2:] for p in parts)))
    assert_bit_equal(whole[0], jnp.concatenate([p[0] for p in parts]))
