"""`moe_combine`, and the whole layer of experts that it closes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from isojax.layouts import Segments
from pallas_kernels import experts, moe_combine, router, swiglu
from pallas_kernels.experts import dispatch_plan
from pallas_kernels.experts import stock as stock_experts
from pallas_kernels.fork import fork
from pallas_kernels.linear import column_linear
from pallas_kernels.moe_combine import stock as stock_combine
from pallas_kernels.router import stock as stock_router
from tests.bits import assert_bit_equal, differing

DTYPES = ["bfloat16", "float32"]
EXPERTS, TOP_K, EMBED, INNER = 6, 3, 32, 16


def random(seed, *shape, dtype="float32", scale=1.0):
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def terms_of_rows(rows, dtype, seed=0):
    """Expert outputs as pairs, weights, a plan, shared outputs and gates; every seventh row has no expert."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
    chosen[3::7] = EXPERTS
    plan = jax.jit(dispatch_plan, static_argnums=1)(jnp.asarray(chosen), EXPERTS)
    weights = jnp.where(chosen < EXPERTS, jax.random.uniform(jax.random.key(seed), (rows, TOP_K)), 0.0)
    y = random(1, rows, TOP_K, EMBED, dtype=dtype).at[plan.row, plan.rank].get(mode="fill", fill_value=jnp.nan)
    return y, weights, plan, random(2, rows, EMBED, dtype=dtype), random(3, rows, 1, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_terms_are_chained_by_rank_and_the_shared_expert_comes_last(dtype):
    y, weights, plan, shared, gate = terms_of_rows(70, dtype)
    gate = jnp.full_like(gate, 40.0)  # Its sigmoid is exactly one, in every implementation.
    got = jax.jit(moe_combine.moe_combine)(y, weights, plan, shared, gate)
    outputs = np.append(np.asarray(y, np.float32), np.zeros((1, EMBED), np.float32), 0)[plan.position]
    terms = [outputs[:, r] * np.asarray(weights)[:, r, None] for r in range(TOP_K)] + [np.asarray(shared, np.float32)]
    assert got.dtype == dtype
    assert_bit_equal(got, trees.chain(np.add, terms).astype(dtype))
    assert_bit_equal(got[3::7], shared[3::7])  # Rows without an expert.
    if dtype == "float32":
        assert differing(got, trees.fold(np.add, terms)) > 100
        assert differing(got, trees.chain(np.add, terms[::-1])) > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_float64(dtype):
    y, weights, plan, shared, gate = terms_of_rows(70, dtype)
    cotangent = random(4, 70, EMBED, dtype=dtype)

    def gradients(of, *args):
        _, pull = jax.vjp(lambda y, w, s, g: of(y, w, plan, s, g), *args)
        return jax.jit(pull)(cotangent)

    got = gradients(moe_combine.moe_combine, y, weights, shared, gate)
    native = gradients(stock_combine.moe_combine, y, weights, shared, gate)
    assert [g.dtype for g in got] == [jnp.dtype(dtype), jnp.float32, jnp.dtype(dtype), jnp.dtype(dtype)]

    g, s, z = (np.asarray(a, np.float64) for a in (cotangent, shared, gate))
    row, real = np.minimum(plan.row, 69), np.asarray(plan.row)[:, None] < 70
    outputs = np.append(np.asarray(y, np.float64), np.zeros((1, EMBED)), 0)[plan.position]
    sigmoid = 1 / (1 + np.exp(-z))
    want = (
        np.where(real, g[row] * np.asarray(weights)[row, plan.rank, None], 0),
        np.einsum("re,rke->rk", g, outputs),
        g * sigmoid,
        (g * s).sum(-1, keepdims=True) * sigmoid * (1 - sigmoid),
    )
    error = {"rtol": 2**-8, "atol": 1e-5} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    for a, b, c in zip(got, want, native, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, **error)
        np.testing.assert_allclose(np.asarray(c, np.float64), b, **error)
    assert not np.asarray(got[0])[~real[:, 0]].any()


def test_bringing_pairs_home_is_a_gather_both_ways():
    y, weights, plan, shared, gate = terms_of_rows(70, "float32")

    def program(of):
        return str(jax.make_jaxpr(jax.grad(lambda y: jnp.sum(of(y, weights, plan, shared, gate))))(y))

    assert "scatter" not in program(moe_combine.moe_combine)
    assert "scatter" in program(stock_combine.moe_combine)


# A layer of experts


def parameters(dtype):
    shapes = {
        "router": (EXPERTS, EMBED),
        "gate_up": (EXPERTS, 2 * INNER, EMBED),
        "down": (EXPERTS, EMBED, INNER),
        "shared_gate_proj": (INNER, EMBED),
        "shared_up_proj": (INNER, EMBED),
        "shared_down_proj": (EMBED, INNER),
        "shared_gate": (1, EMBED),
    }
    # Representable in the compute dtype, so that the float64 layer has the same weights.
    return {
        name: random(i, *shape, dtype=dtype, scale=0.3).astype(jnp.float32)
        for i, (name, shape) in enumerate(shapes.items())
    }


def moe(w, x, valid, segments):
    """The experts of one layer, as a model composes them."""
    for_router, for_pairs, for_shared = fork(x, 3)
    linear = functools.partial(column_linear, segments=segments)
    (logits,) = linear(for_router, (w["router"],), out_dtypes=(jnp.float32,))
    weights, chosen = router.router(logits, valid, top_k=TOP_K)
    plan = dispatch_plan(chosen, EXPERTS, segments)
    gate_up = experts.grouped_linear(experts.gather_rows(for_pairs, plan), w["gate_up"], plan)
    y = experts.grouped_linear(swiglu.swiglu_fused(gate_up), w["down"], plan)
    gate, up, shared_gate = linear(for_shared, (w["shared_gate_proj"], w["shared_up_proj"], w["shared_gate"]))
    (shared,) = linear(swiglu.swiglu(gate, up), (w["shared_down_proj"],))
    return moe_combine.moe_combine(y, weights, plan, shared, shared_gate)


def moe_native(w, x, valid, segments):
    """The same layer from the stock twins."""
    del segments
    weights, chosen = stock_router.router(x.astype(jnp.float32) @ w["router"].T, valid, top_k=TOP_K)
    plan = dispatch_plan(chosen, EXPERTS)
    w = {name: value.astype(x.dtype) for name, value in w.items()}
    gate_up = stock_experts.grouped_linear(stock_experts.gather_rows(x, plan), w["gate_up"], plan)
    y = stock_experts.grouped_linear(swiglu.reference.swiglu_fused(gate_up), w["down"], plan)
    shared = swiglu.reference.swiglu(x @ w["shared_gate_proj"].T, x @ w["shared_up_proj"].T) @ w["shared_down_proj"].T
    return stock_combine.moe_combine(y, weights, plan, shared, x @ w["shared_gate"].T)


def moe_float64(w, x):
    """The layer in float64, token by token."""
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    silu = lambda a: a * sigmoid(a)  # noqa: E731
    w = {name: np.asarray(value, np.float64) for name, value in w.items()}
    x = np.asarray(x, np.float64)
    p = np.exp(x @ w["router"].T)
    p /= p.sum(-1, keepdims=True)
    chosen = np.argsort(-p, -1, kind="stable")[:, :TOP_K]
    weights = np.take_along_axis(p, chosen, -1)
    weights /= weights.sum(-1, keepdims=True)
    out = np.zeros_like(x)
    for n, row in enumerate(chosen):
        for rank, expert in enumerate(row):
            h = w["gate_up"][expert] @ x[n]
            out[n] += weights[n, rank] * (w["down"][expert] @ (silu(h[:INNER]) * h[INNER:]))
    shared = (silu(x @ w["shared_gate_proj"].T) * (x @ w["shared_up_proj"].T)) @ w["shared_down_proj"].T
    return out + sigmoid(x @ w["shared_gate"].T) * shared, chosen


def moe_dense(w, x, chosen):
    """Differentiable in any dtype: every expert on every token, masked by the experts chosen."""
    p = jnp.take_along_axis(jax.nn.softmax(x @ w["router"].T), chosen, -1)
    weights = jnp.einsum("rk,rke->re", p / p.sum(-1, keepdims=True), jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype))
    gate, up = jnp.split(jnp.einsum("eoi,ri->reo", w["gate_up"], x), 2, axis=-1)
    routed = jnp.einsum("reo,edo,re->rd", jax.nn.silu(gate) * up, w["down"], weights)
    shared = (jax.nn.silu(x @ w["shared_gate_proj"].T) * (x @ w["shared_up_proj"].T)) @ w["shared_down_proj"].T
    return routed + jax.nn.sigmoid(x @ w["shared_gate"].T) * shared


@functools.partial(jax.jit, static_argnums=0)
def forward_and_gradients(layer, w, x, valid, segments, cotangent):
    out, pull = jax.vjp(lambda w, x: layer(w, x, valid, segments), w, x)
    return out, *pull(cotangent)


def run(w, x, cotangent, segments=None, valid=None, layer=moe):
    rows = x.shape[0]
    valid = jnp.ones(rows, bool) if valid is None else valid
    return forward_and_gradients(layer, w, x, valid, segments or Segments.one(rows), cotangent)


def error(got, want):
    """The largest error, to the largest value."""
    want = np.asarray(want, np.float64)
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("layer", [moe, moe_native])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layer_and_its_gradients_agree_with_float64(dtype, layer):
    w, x, cotangent = parameters(dtype), random(8, 64, EMBED, dtype=dtype), random(9, 64, EMBED, dtype=dtype)
    out, w_grad, x_grad = run(w, x, cotangent, layer=layer)
    want, chosen = moe_float64(w, x)
    bound = 2e-2 if dtype == "bfloat16" else 2e-6
    assert error(out, want) < bound
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (w, x))
        dense, pull = jax.vjp(lambda w, x: moe_dense(w, x, jnp.asarray(chosen)), *wide)
        np.testing.assert_allclose(dense, want, atol=1e-12)
        want_w, want_x = pull(jnp.asarray(cotangent, jnp.float64))
    assert error(x_grad, want_x) < bound
    for name, grad in w_grad.items():
        assert grad.dtype == jnp.float32
        assert error(grad, want_w[name]) < bound, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits_in_any_batch(dtype):
    w, x, cotangent = parameters(dtype), random(8, 64, EMBED, dtype=dtype), random(9, 64, EMBED, dtype=dtype)
    out, _, x_grad = run(w, x, cotangent)
    got, _, got_grad = run(w, x[:1], cotangent[:1])
    assert_bit_equal((got, got_grad), (out[:1], x_grad[:1]))
    got, _, got_grad = run(w, x[::-1], cotangent[::-1])
    assert_bit_equal((got[::-1], got_grad[::-1]), (out, x_grad))


def test_a_row_of_the_native_layer_does_not():
    w, x, cotangent = parameters("float32"), random(8, 64, EMBED), random(9, 64, EMBED)
    out, _, _ = run(w, x, cotangent, layer=moe_native)
    alone, _, _ = run(w, x[:1], cotangent[:1], layer=moe_native)
    assert differing(alone, out[:1]) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_batch_are_the_tree_over_its_sequences(dtype):
    w, x, cotangent = parameters(dtype), random(8, 256, EMBED, dtype=dtype), random(9, 256, EMBED, dtype=dtype)
    _, whole, _ = run(w, x, cotangent, Segments(jnp.arange(4, dtype=jnp.int32), 4))
    alone = [run(w, x[i : i + 64], cotangent[i : i + 64])[1] for i in range(0, 256, 64)]
    folded = jax.jit(lambda *grads: trees.fold(lambda a, b: jax.tree.map(jnp.add, a, b), grads))(*alone)
    assert_bit_equal(whole, folded)
    chained = functools.reduce(lambda a, b: a + b, [grad["down"] for grad in alone])
    assert differing(whole["down"], chained) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_b073_nan_in_rows_that_are_no_tokens_reaches_no_expert(dtype):
    w, x, cotangent = parameters(dtype), random(8, 64, EMBED, dtype=dtype), random(9, 64, EMBED, dtype=dtype)
    valid = jnp.arange(64) < 50
    pads = ~valid[:, None]
    cotangent = jnp.where(pads, 0, cotangent)
    out, w_grad, x_grad = run(w, jnp.where(pads, 0, x), cotangent, valid=valid)
    got, got_w, got_x = run(w, jnp.where(pads, jnp.nan, x), cotangent, valid=valid)
    assert_bit_equal((got[:50], got_x[:50]), (out[:50], x_grad[:50]))
    for name in ("gate_up", "down"):
        assert_bit_equal(got_w[name], w_grad[name])
