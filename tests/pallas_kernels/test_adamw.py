import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.adamw import Hyperparameters, adamw_apply, adamw_step, factors, reference, stock
from tests.bits import assert_bit_equal, differing

HYPER = Hyperparameters(b1=0.9, b2=0.95, weight_decay=0.1, max_grad_norm=1.0)
apply = jax.jit(adamw_apply, static_argnums=5)
step = jax.jit(adamw_step, static_argnums=5)


def tensors(*shape):
    param, mu, nu, grad = (jax.random.normal(jax.random.key(i), shape) for i in range(4))
    return param, 0.1 * mu, 0.01 * nu * nu, grad


def common(count=3, rate=1e-3, norm=2.5, hyper=HYPER):
    return factors(jnp.int32(count), jnp.float32(rate), jnp.float32(norm), hyper)


def test_factors_are_scale_corrections_and_rate():
    want = [1 / 2.5, 1 - 0.9**3, 1 - 0.95**3, 1e-3]
    np.testing.assert_allclose(common(), want, rtol=1e-6)
    assert common(norm=0.999)[0] == 1
    assert common(norm=0.0)[0] == 1
    assert np.isnan(common(norm=np.nan)[0])
    assert factors(jnp.int32(1), jnp.float32(1), None, Hyperparameters())[0] == 1


@pytest.mark.parametrize("hyper", [HYPER, Hyperparameters()])
def test_it_is_the_definition(hyper):
    arrays = tensors(70, 33)
    got = apply(*arrays, common(hyper=hyper), hyper)
    settings = {name: getattr(hyper, name) for name in ("b1", "b2", "eps", "weight_decay")}
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(a), jnp.float64) for a in arrays)
        scale = 1 / 2.5 if hyper.max_grad_norm else 1.0
        want = reference.adamw(*wide, count=3, learning_rate=1e-3, scale=scale, **settings)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def test_every_operation_rounds_once():
    param, mu, nu, grad = map(np.asarray, tensors(70, 33))
    scale, of_mu, of_nu, rate = np.asarray(common())
    f = np.float32
    grad = grad * scale
    mu = f(0.9) * mu + f(1 - 0.9) * grad
    nu = f(0.95) * nu + f(1 - 0.95) * (grad * grad)
    direction = (mu / of_mu) / (np.sqrt(nu / of_nu) + f(1e-8)) + f(0.1) * param
    want = (param + -rate * direction, mu, nu)
    assert_bit_equal(tuple(apply(*tensors(70, 33), common(), HYPER)), want)


def test_an_element_has_the_same_bits_in_any_tensor():
    arrays, shared = tensors(130, 70), common()
    want = apply(*arrays, shared, HYPER)
    for cut in ((slice(1),), (slice(7, 72),), (slice(None), slice(0, 33)), (3, slice(5, 6))):
        got = apply(*(a[cut] for a in arrays), shared, HYPER)
        assert_bit_equal(tuple(got), tuple(w[cut] for w in want))


def test_the_update_added_is_the_parameter_applied():
    arrays, shared = tensors(70, 33), common()
    added = step(*arrays, shared, HYPER)
    assert_bit_equal(arrays[0] + added.value, apply(*arrays, shared, HYPER).value)


def test_the_stock_update_means_the_same_and_rounds_otherwise():
    arrays, shared = tensors(70, 33), common()
    exact, native = (fn(*arrays, shared, HYPER) for fn in (apply, jax.jit(stock.adamw_apply, static_argnums=5)))
    for a, b in zip(native, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert differing(native.nu, exact.nu)


def test_a_bad_norm_is_a_bad_parameter():
    assert np.isnan(apply(*tensors(7, 33), common(norm=np.nan), HYPER).value).all()
