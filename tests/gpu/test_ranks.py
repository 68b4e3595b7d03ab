"""Ops on the GPUs of one host: the bits of one GPU. Two or more are needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from isojax import ops
from isojax.layouts import Segments
from tests.bits import assert_bit_equal, differing
from tests.pallas_kernels.meshes import ALL, AXIS, COLUMNS, ROWS, assert_as_on_one_device, on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")]

RANKS = [n for n in (2, 4, 8) if n <= jax.device_count()]
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
HEADS = P(None, AXIS)
ALL_ROWS = 512
SEGMENTS = Segments(jnp.asarray(np.array([0, 0, 0, 1, 1, 2, 4, 4]), jnp.int32), 5)


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@DTYPES
def test_a_scale_over_sharded_rows_has_the_gradient_of_one_gpu(dtype):
    x, cotangent = (random(i, ALL_ROWS, 2048, dtype=dtype) for i in range(2))
    assert_as_on_one_device(
        lambda x, scale: ops.rms_norm(x, scale, segments=SEGMENTS),
        lambda x, scale: ops.rms_norm(x, scale, segments=SEGMENTS, axis_name=AXIS),
        *((x, random(2, 2048)), (ROWS, ALL), cotangent, ROWS, RANKS),
    )


@DTYPES
@pytest.mark.parametrize("op", ["norm_rope", "gated_norm"])
def test_a_scale_that_heads_share_has_the_gradient_of_one_gpu(op, dtype):
    width = 256 if op == "norm_rope" else 128
    x, z, cotangent = (random(i, ALL_ROWS, 16, width, dtype=dtype) for i in range(3))
    tables = [jnp.asarray(table)[:ALL_ROWS] for table in ops.rotary_tables(ALL_ROWS, 64, 1e7)]

    def run(axis_name):
        if op == "norm_rope":
            return lambda x, scale: ops.norm_rope(x, scale, *tables, segments=SEGMENTS, axis_name=axis_name)
        return lambda x, z, scale: ops.gated_norm(x, z, scale, segments=SEGMENTS, axis_name=axis_name)

    rows = (x,) if op == "norm_rope" else (x, z)
    specs = (*[HEADS] * len(rows), ALL)
    assert_as_on_one_device(run(None), run(AXIS), (*rows, random(3, width)), specs, cotangent, HEADS, RANKS)


@DTYPES
@pytest.mark.parametrize("rows", ["replicated", "sharded"])
def test_rows_go_to_their_experts_and_come_home_as_on_one_gpu(rows, dtype):
    sharded = rows == "sharded"
    x, shared, cotangent = (random(i, ALL_ROWS, 256, dtype=dtype) for i in range(3))
    logits, gate = random(3, ALL_ROWS, 16), random(4, ALL_ROWS, 1, dtype=dtype)

    def layer(axis_name):
        def run(x, logits, shared, gate):
            weights, chosen = ops.router(logits, jnp.ones(x.shape[0], bool), top_k=4)
            gather = 0 if axis_name and sharded else None
            plan = ops.dispatch_plan(chosen, 16, SEGMENTS, axis_name=axis_name, gather_axis=gather)
            return ops.moe_combine(ops.gather_rows(x, plan), weights, plan, shared, gate)

        return run

    spec = ROWS if sharded else ALL
    assert_as_on_one_device(layer(None), layer(AXIS), (x, logits, shared, gate), (spec,) * 4, cotangent, spec, RANKS)


@pytest.mark.parametrize("rows", [64, 8192])
def test_a_row_parallel_product_has_the_bits_of_one_gpu_and_xlas_does_not(rows):
    x, weight = random(0, rows, 4096, dtype="bfloat16"), random(1, 2048, 4096, dtype="bfloat16")
    want = jax.jit(ops.row_linear)(x, weight)
    for ranks in RANKS:
        specs = ((COLUMNS, COLUMNS), ALL)
        assert_bit_equal(on_ranks(lambda x, w: ops.row_linear(x, w, axis_name=AXIS), ranks, *specs)(x, weight), want)
        scattered = on_ranks(
            lambda x, w: ops.row_linear(x, w, axis_name=AXIS, scatter_axis=0), ranks, (COLUMNS, COLUMNS), ROWS
        )
        assert_bit_equal(scattered(x, weight), want)
        stock = on_ranks(lambda x, w: jax.lax.psum(jnp.dot(x, w.T), AXIS), ranks, *specs)(x, weight)
        assert differing(stock, jax.jit(lambda x, w: jnp.dot(x, w.T))(x, weight))
