"""Bits on an H200, over schedules, rows and batches. Run there: `python -m pytest -m gpu tests/gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from pallas_kernels.cast import cast
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.gdn_gates import gdn_gates
from pallas_kernels.l2_norm import l2_norm
from pallas_kernels.linear import column_linear, row_linear
from pallas_kernels.linear.hopper import HopperSchedule, product
from pallas_kernels.output_gate.op import _op as output_gate
from pallas_kernels.residual_add.op import _op as residual_add
from pallas_kernels.rms_norm.op import _op as rms_norm
from pallas_kernels.rows import Schedule as RowSchedule
from pallas_kernels.swiglu.op import _swiglu as swiglu

pytestmark = pytest.mark.gpu

SCHEDULES = [
    HopperSchedule(),
    HopperSchedule(2, 128, 64, 4, (1, 8)),
    HopperSchedule(2, 64, 64, 6),
    HopperSchedule(2, 64, 128, 3),
    HopperSchedule(1, 64, 64, 8),
    HopperSchedule(1, 32, 128, 8),
    HopperSchedule(1, 16, 256, 5),
]


def bits(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def random(seed, *shape, dtype="bfloat16"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_schedule_changes_a_bit_of_a_product(num_splits, dtype):
    x, w = random(0, 640, 4096), random(1, 320, 4096)
    run = lambda schedule: jax.jit(lambda x, w: product(x, w, num_splits, jnp.dtype(dtype), schedule))(x, w)
    want = bits(run(HopperSchedule(1, 64, 64, 4)))
    for schedule in SCHEDULES:
        if dtype == "float32" and schedule.columns == 128 and num_splits == 8:
            continue  # Staging, ring and parked sum together exceed shared memory.
        np.testing.assert_array_equal(bits(run(schedule)), want)


@pytest.mark.parametrize("num_splits", [2, 4, 8])
def test_the_tree_is_the_fold_of_the_splits(num_splits):
    x, w = random(0, 256, 4096), random(1, 128, 4096)
    width = 4096 // num_splits
    chain = jax.jit(lambda x, w: product(x, w, 1, jnp.dtype("float32"), HopperSchedule(1, 64)))
    parts = [chain(x[:, i * width :][:, :width], w[:, i * width :][:, :width]) for i in range(num_splits)]
    want = jax.jit(lambda *p: trees.fold(jnp.add, p))(*parts)
    got = jax.jit(lambda x, w: product(x, w, num_splits, jnp.dtype("float32"), HopperSchedule(1, 64)))(x, w)
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("layer", ["column", "row"])
def test_a_row_keeps_its_bits_in_any_company(layer):
    x, w = random(0, 1000, 2048), random(1, 512, 2048, dtype="float32")
    run = jax.jit(row_linear if layer == "row" else lambda x, w: column_linear(x, (w,))[0])
    want = bits(run(x, w))
    for rows in (1, 7, 16, 33, 64, 65, 257):
        np.testing.assert_array_equal(bits(run(x[:rows], w)), want[:rows])
    np.testing.assert_array_equal(bits(run(x[::-1], w))[::-1], want)


def test_a_product_agrees_with_float64():
    x, w = random(0, 256, 2048), random(1, 128, 2048)
    got = jax.jit(lambda x, w: product(x, w, 8, jnp.dtype("float32"), HopperSchedule(1, 64)))(x, w)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert np.abs(np.asarray(got) - want).max() < 2e-6 * np.abs(want).max()


def test_the_stock_product_does_not_keep_a_rows_bits():
    x, w = random(0, 512, 4096), random(1, 512, 4096)
    run = jax.jit(lambda x, w: jnp.dot(x, w.T, preferred_element_type=jnp.float32))
    assert (bits(run(x[:1], w)) != bits(run(x, w))[:1]).any()


ROW_OPS = {
    "rms_norm": lambda x, y, s: rms_norm(1e-6)(x, jnp.ones(x.shape[1]) * 0.1, schedule=s),
    "residual_add": lambda x, y, s: residual_add(x, y, schedule=s),
    "output_gate": lambda x, y, s: output_gate(x, y, schedule=s),
    "swiglu": lambda x, y, s: swiglu(x, y, schedule=s),
}


@pytest.mark.parametrize("name", ROW_OPS)
def test_no_block_of_rows_changes_a_bit_of_a_row_wise_op(name):
    x, y = random(0, 512, 2048), random(1, 512, 2048)
    run = lambda x, y, rows: bits(jax.jit(lambda x, y: ROW_OPS[name](x, y, RowSchedule(rows)))(x, y))
    want = run(x, y, 4)
    for block in (1, 2, 8, 16):
        np.testing.assert_array_equal(run(x, y, block), want)
    for rows in (1, 7, 33, 257):
        np.testing.assert_array_equal(run(x[:rows], y[:rows], 4), want[:rows])
    fused = jax.jit(lambda x, y: (ROW_OPS[name](x, y, RowSchedule(4)), (x + y) * 2))(x, y)[0]
    np.testing.assert_array_equal(bits(fused), want)


def _heads(op):
    return lambda x: op(x.reshape(x.shape[0], 16, 128))


HEAD_OPS = {
    "l2_norm": _heads(lambda x: l2_norm(x, scale=1.0)),
    "gated_norm": _heads(lambda x: gated_norm(x, x, jnp.ones(128), eps=1e-6)),
    "gdn_gates": lambda x: gdn_gates(x[:, :32], x[:, 32:64], jnp.ones(32), jnp.ones(32))[0],
    "cast": lambda x: cast(x.astype(jnp.float32), jnp.bfloat16),
}


@pytest.mark.parametrize("name", HEAD_OPS)
def test_a_row_of_a_head_wise_op_keeps_its_bits_in_any_company(name):
    x = random(0, 512, 2048)
    run = jax.jit(HEAD_OPS[name])
    want = bits(run(x))
    for rows in (1, 7, 33, 257):
        np.testing.assert_array_equal(bits(run(x[:rows])), want[:rows])


