"""Experts on the ranks of a mesh axis: the layer has the bits of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import isojax
from isojax import ops
from isojax.contract import load
from isojax.errors import ShardingError
from isojax.layouts import Segments
from pallas_kernels.experts import Plan
from pallas_kernels.experts import stock as stock_experts
from pallas_kernels.moe_combine import stock as stock_combine
from tests.bits import assert_bit_equal, bits, differing
from tests.pallas_kernels.meshes import ALL, AXIS, ROWS, assert_as_on_one_device, on_ranks, pulled

EXPERTS, TOP_K, EMBED, INNER, ALL_ROWS = 8, 3, 32, 16, 256
SEGMENTS = Segments(jnp.asarray([0, 0, 1, 3], jnp.int32), 4)
LAYOUTS = pytest.mark.parametrize("rows", ["replicated", "sharded"])


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def layer(x, logits, shared, shared_gate, gate_up, down, *, axis_name=None, rows="replicated"):
    """Routed experts and the sum with a shared one; one row in eight is no token, the first expert is favoured."""
    count = logits.shape[0]
    valid = jnp.arange(count) % 8 != 5
    weights, chosen = ops.router(logits, valid, top_k=TOP_K)
    gather = 0 if rows == "sharded" else None
    plan = ops.dispatch_plan(chosen, EXPERTS, SEGMENTS, axis_name=axis_name, gather_axis=gather)
    hidden = ops.grouped_linear(ops.gather_rows(x, plan), gate_up, plan)
    routed = ops.grouped_linear(ops.swiglu_fused(hidden), down, plan)
    return ops.moe_combine(routed, weights, plan, shared, shared_gate)


def arguments(dtype):
    logits = 2 * random(1, ALL_ROWS, EXPERTS) + 3.0 * (jnp.arange(EXPERTS) == 0) - 9.0 * (jnp.arange(EXPERTS) == 6)
    rows = random(0, ALL_ROWS, EMBED, dtype=dtype), logits, random(2, ALL_ROWS, EMBED, dtype=dtype)
    weights = random(4, EXPERTS, 2 * INNER, EMBED), random(5, EXPERTS, EMBED, INNER)
    return *rows, random(3, ALL_ROWS, 1, dtype=dtype), *weights


def specs(rows):
    return (*[ROWS if rows == "sharded" else ALL] * 4, ROWS, ROWS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@LAYOUTS
def test_a_layer_of_experts_on_ranks_has_the_bits_of_one_device(rows, dtype):
    """Also for an expert without a row, a rank without a pair, and rows that are no token."""
    out = ROWS if rows == "sharded" else ALL
    assert_as_on_one_device(
        layer,
        lambda *args: layer(*args, axis_name=AXIS, rows=rows),
        arguments(dtype),
        specs(rows),
        random(6, ALL_ROWS, EMBED, dtype=dtype),
        out,
        ranks=(8,) if dtype == "float32" else (4,),
    )


def test_outputs_that_do_not_come_home_from_their_owner_show(monkeypatch):
    """Negative control: the comparison sees an output that comes from the wrong rank, and one that does not come."""
    args = arguments("float32")
    want = jax.jit(layer)(*args)

    def on_four():
        run = on_ranks(lambda *args: layer(*args, axis_name=AXIS), 4, specs("replicated"), ALL)
        return run(*args)

    assert_bit_equal(on_four(), want)
    moved = Plan.from_owners
    for broken in (lambda plan, y: y, lambda plan, y: moved(dataclasses.replace(plan, owner=(plan.owner + 1) % 4), y)):
        monkeypatch.setattr(Plan, "from_owners", broken)
        assert differing(on_four(), want)


@LAYOUTS
def test_a_negative_zero_comes_home_as_one(rows):
    """Moves do not add: summed with the zeros of other ranks it would be +0."""
    x, chosen = -jnp.zeros((64, 4)), jnp.arange(128, dtype=jnp.int32).reshape(64, 2) % 4
    weights, gate = jnp.ones((64, 2)), jnp.full((64, 1), -jnp.inf)

    def op(x, axis_name=None):
        gather = 0 if rows == "sharded" and axis_name else None
        own = chosen if gather is None else jax.lax.dynamic_slice_in_dim(chosen, 32 * jax.lax.axis_index(AXIS), 32)
        plan = ops.dispatch_plan(own, 4, axis_name=axis_name, gather_axis=gather)
        n = own.shape[0]
        return ops.moe_combine(ops.gather_rows(x, plan), weights[:n], plan, -jnp.zeros((n, 4)), gate[:n])

    spec = ROWS if rows == "sharded" else ALL
    want = jax.jit(pulled(op))((x,), x)
    got = on_ranks(pulled(lambda x: op(x, AXIS)), 2, ((spec,), spec), (spec, (spec,)))((x,), x)
    assert (bits(want[0]) == bits(x)).all()
    assert_bit_equal(got, want)


@LAYOUTS
def test_the_audit_of_a_layer_on_ranks_finds_regions_alone(rows):
    run = on_ranks(
        pulled(lambda *args: layer(*args, axis_name=AXIS, rows=rows)),
        4,
        (specs(rows), specs(rows)[0]),
        (specs(rows)[0], specs(rows)),
    )
    report = isojax.audit(run, arguments("bfloat16"), random(6, ALL_ROWS, EMBED, dtype="bfloat16"))
    assert not report.findings
    load("exact").refuse_unknown_regions(report.regions)


def test_experts_that_do_not_divide_and_native_ops_are_refused():
    def plan(num_experts):
        return ops.dispatch_plan(jnp.zeros((64, 1), jnp.int32), num_experts, axis_name=AXIS)

    with pytest.raises(ShardingError, match=r"6 experts, which do not divide over tensor=4: shard over 1 or 2 or 3"):
        on_ranks(lambda x: ops.gather_rows(x, plan(6)), 4, ALL, ALL)(random(0, 64, 8))
    with pytest.raises(ShardingError, match="the native gather_rows runs on one device, got a plan over tensor"):
        on_ranks(lambda x: stock_experts.gather_rows(x, plan(4)), 4, ALL, ALL)(random(0, 64, 8))
    with pytest.raises(ShardingError, match="the native moe_combine"):
        on_ranks(lambda x: stock_combine.moe_combine(x, jnp.ones((64, 1)), plan(4), x, x[:, :1]), 4, ALL, ALL)(
            random(0, 64, 8)
        )
