"""Bits of products on an H200, over schedules, rows and batches. Run there: `python -m pytest -m gpu tests/gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from pallas_kernels.linear import column_linear, row_linear
from pallas_kernels.linear.hopper import HopperSchedule, product

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
TALL = [HopperSchedule(2, 128, 64, 3, (0, 4), 128), HopperSchedule(1, 128, 64, 3, (1, 8), 128)]  # For one split.


def bits(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def random(seed, *shape, dtype="bfloat16"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_schedule_changes_a_bit_of_a_product(num_splits, dtype):
    x, w = random(0, 640, 4096), random(1, 320, 4096)

    def run(schedule):
        return jax.jit(lambda x, w: product(x, w, num_splits, jnp.dtype(dtype), schedule))(x, w)

    want = bits(run(HopperSchedule(1, 64, 64, 4)))
    for schedule in SCHEDULES + TALL * (num_splits == 1):
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
