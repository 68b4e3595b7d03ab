import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import load_balancing_loss, reference, router, router_load, stock
from tests.bits import assert_bit_equal

EXPERTS, TOP_K = 16, 4


def random_logits(rows, seed=0):
    return 2 * jax.random.normal(jax.random.key(seed), (rows, EXPERTS), jnp.float32)


def route(logits, valid=None, top_k=TOP_K, of=router):
    valid = jnp.ones(logits.shape[0], bool) if valid is None else valid
    return jax.jit(lambda logits, valid: of(logits, valid, top_k=top_k))(logits, valid)


def softmax(logits):
    p = np.exp(np.asarray(logits, np.float64) - np.max(logits, -1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def logits_gradient(logits, valid, cotangent, of=router):
    value = jax.jit(lambda x, v, c: jax.vjp(lambda x: of(x, v, top_k=TOP_K)[0], x)[1](c)[0])
    return value(logits, valid, cotangent)


def test_weights_are_the_renormalised_largest_probabilities():
    logits = random_logits(100)
    weights, experts = route(logits)
    p = softmax(logits)
    order = np.argsort(-p, -1, kind="stable")[:, :TOP_K]
    np.testing.assert_array_equal(experts, order)
    chosen = np.take_along_axis(p, order, -1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-6)


def test_a_row_keeps_its_bits_in_any_company():
    logits = random_logits(130)
    want = route(logits)
    for rows in (1, 7, 33):
        assert_bit_equal(route(logits[:rows]), tuple(x[:rows] for x in want))
    assert_bit_equal(route(logits[77:78]), tuple(x[77:78] for x in want))
    assert_bit_equal(route(logits[::-1]), tuple(x[::-1] for x in want))


@pytest.mark.parametrize("of", [router, reference.router, stock.router], ids=["region", "reference", "stock"])
def test_b070_experts_with_equal_gate_rows_are_chosen_lowest_first(of):
    rng = np.random.default_rng(0)
    gate = rng.standard_normal((EXPERTS, 32)).astype(np.float32)
    gate[[11, 5]] = gate[2]
    x = rng.standard_normal((66, 32)).astype(np.float32)
    logits = jnp.stack([jnp.asarray((x * row).sum(-1)) for row in gate], axis=-1)  # Equal rows, equal logits.
    _, experts = route(logits, of=of)
    _, alone = route(logits[:1], of=of)
    np.testing.assert_array_equal(alone[0], experts[0])
    tied = [[e for e in row if e in (2, 5, 11)] for row in np.asarray(experts).tolist()]
    assert [2, 5, 11] in tied
    assert all(row == [2, 5, 11][: len(row)] for row in tied)


def test_a_row_of_equal_logits_takes_the_first_experts():
    _, experts = route(jnp.zeros((3, EXPERTS)))
    np.testing.assert_array_equal(experts, np.tile(np.arange(TOP_K), (3, 1)))


def test_b071_the_selection_follows_float32_scores():
    logits = jnp.zeros((2, EXPERTS)).at[:, 3].set(1.0).at[0, 9].set(1.0 + 1e-4).at[1, 9].set(1.0 - 1e-4)
    _, experts = route(logits, top_k=1)
    np.testing.assert_array_equal(experts, [[9], [3]])
    _, rounded = route(logits.astype(jnp.bfloat16).astype(jnp.float32), top_k=1)
    np.testing.assert_array_equal(rounded, [[3], [3]])  # What selecting from bfloat16 would have done.


def test_b073_rows_that_are_no_tokens_may_hold_nan():
    logits, cotangent = random_logits(70), jax.random.normal(jax.random.key(1), (70, TOP_K))
    valid = jnp.arange(70) % 3 != 1
    poisoned = jnp.where(valid[:, None], logits, jnp.nan)
    weights, experts = route(poisoned, valid)
    whole = route(logits)
    assert_bit_equal((weights[valid], experts[valid]), tuple(x[valid] for x in whole))
    assert (experts[~valid] == EXPERTS).all()
    assert_bit_equal(weights[~valid], jnp.zeros_like(weights[~valid]))
    got = logits_gradient(poisoned, valid, jnp.where(valid[:, None], cotangent, jnp.nan))
    assert_bit_equal(got[valid], logits_gradient(logits, jnp.ones(70, bool), cotangent)[valid])
    assert not np.asarray(got[~valid]).any()


def test_a_nan_of_a_token_stays_visible():
    weights, experts = route(random_logits(3).at[1, 4].set(jnp.nan))
    assert np.isnan(weights[1]).all()
    assert (experts[1] == EXPERTS).all()
    assert np.isfinite(weights[jnp.array([0, 2])]).all()


def test_gradients_agree_with_float64():
    logits, cotangent = random_logits(70), jax.random.normal(jax.random.key(1), (70, TOP_K))
    got = logits_gradient(logits, jnp.ones(70, bool), cotangent)
    p = softmax(logits)
    order = np.argsort(-p, -1, kind="stable")[:, :TOP_K]
    with jax.enable_x64(True):

        def value(logits):
            chosen = jnp.take_along_axis(jax.nn.softmax(logits), jnp.asarray(order), -1)
            return jnp.sum(chosen / chosen.sum(-1, keepdims=True) * np.asarray(cotangent, np.float64))

        want = jax.grad(value)(jnp.asarray(logits, jnp.float64))
    np.testing.assert_allclose(got, want, atol=3e-7)
    native = logits_gradient(logits, jnp.ones(70, bool), cotangent, stock.router)
    np.testing.assert_allclose(native, want, atol=3e-7)


def test_a_row_of_gradients_keeps_its_bits_in_any_company():
    logits, cotangent = random_logits(100), jax.random.normal(jax.random.key(1), (100, TOP_K))
    valid = jnp.ones(100, bool)
    want = logits_gradient(logits, valid, cotangent)
    for rows in (1, 7, 33):
        assert_bit_equal(logits_gradient(logits[:rows], valid[:rows], cotangent[:rows]), want[:rows])


def test_the_body_uses_only_what_every_kernel_backend_has():
    program = jax.make_jaxpr(lambda x, v: reference.router(x, v, top_k=TOP_K))(
        jnp.zeros((64, EXPERTS)), jnp.ones(64, bool)
    )
    used = {str(eqn.primitive) for eqn in program.eqns}
    assert used.isdisjoint({"top_k", "sort", "argmax", "gather", "scatter", "cumsum", "concatenate"})


def test_the_load_counts_choices_of_tokens():
    logits, valid = random_logits(70), jnp.arange(70) < 50
    _, experts = route(logits)
    counts = router_load(experts, valid, EXPERTS)
    np.testing.assert_array_equal(counts, np.bincount(np.asarray(experts[:50]).ravel(), minlength=EXPERTS))
    assert counts.sum() == 50 * TOP_K


def balance(layers, valid):
    """Counts and terms of the rows of all layers."""
    counts = sum(router_load(route(logits, valid)[1], valid, EXPERTS) for logits in layers)
    return counts, [jax.jit(lambda x: load_balancing_loss(x, valid, counts, top_k=TOP_K))(logits) for logits in layers]


def test_the_balancing_loss_pools_layers_and_leaves_padding_out():
    layers = [random_logits(70, seed) for seed in (0, 1, 2)]
    valid = jnp.arange(70) < 50
    counts, terms = balance([jnp.where(valid[:, None], logits, jnp.nan) for logits in layers], valid)
    p = np.concatenate([softmax(logits[:50]) for logits in layers])
    chosen = np.argsort(-p, -1, kind="stable")[:, :TOP_K]
    load = np.bincount(chosen.ravel(), minlength=EXPERTS) / len(p)
    np.testing.assert_array_equal(counts, load * len(p))
    np.testing.assert_allclose(np.sum(terms), EXPERTS * np.sum(load * p.mean(0)), rtol=1e-6)
    assert not np.asarray(terms)[:, 50:].any()


def test_uniform_routing_has_balancing_loss_top_k():
    valid = jnp.ones(64, bool)
    counts = jnp.full(EXPERTS, 64 * TOP_K // EXPERTS, jnp.int32)
    terms = load_balancing_loss(jnp.zeros((64, EXPERTS)), valid, counts, top_k=TOP_K)
    np.testing.assert_allclose(terms.sum(), TOP_K, rtol=1e-6)


def test_the_balancing_gradient_agrees_with_float64_and_ignores_counts():
    logits, valid = random_logits(70), jnp.arange(70) < 50
    counts = router_load(route(logits, valid)[1], valid, EXPERTS)
    got = jax.jit(jax.grad(lambda x: jnp.sum(load_balancing_loss(x, valid, counts, top_k=TOP_K))))(logits)
    p, load = softmax(logits[:50]), EXPERTS * np.asarray(counts) / 50**2
    np.testing.assert_allclose(got[:50], p * (load - (p * load).sum(-1, keepdims=True)), atol=3e-8)
    assert not np.asarray(got[50:]).any()


def test_more_experts_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match=r"top_k = 17 of 16 experts"):
        route(random_logits(2), top_k=17)
