"""Sums over rows, tokens and parameters that lie on the ranks of a mesh axis: the bits of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import collectives, ops, optim
from isojax.errors import ShardingError
from isojax.layouts import Segments
from pallas_kernels.global_norm import Numerics, global_norm
from tests.bits import assert_bit_equal, differing
from tests.pallas_kernels.meshes import ALL, AXIS, COLUMNS, ROWS, assert_as_on_one_device, on_ranks

ROWS_OF_ALL = 512
# Sequences that no rank holds alone, and one that is absent.
SEGMENTS = Segments(jnp.asarray(np.array([0, 0, 0, 1, 1, 2, 4, 4]), jnp.int32), 5)


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one sequence", "five sequences"])
def test_the_scale_of_a_norm_over_sharded_rows_has_the_gradient_of_one_device(segments, dtype):
    assert_as_on_one_device(
        lambda x, scale: ops.rms_norm(x, scale, segments=segments),
        lambda x, scale: ops.rms_norm(x, scale, segments=segments, axis_name=AXIS),
        (random(0, ROWS_OF_ALL, 80, dtype=dtype), random(1, 80)),
        (ROWS, ALL),
        random(2, ROWS_OF_ALL, 80, dtype=dtype),
        ROWS,
    )


def test_partials_of_ranks_added_afterwards_are_another_sum():
    """Negative control: a chain goes on over ranks, it is no tree of their chains."""
    x, scale, cotangent = random(0, ROWS_OF_ALL, 80), random(1, 80), random(2, ROWS_OF_ALL, 80)

    def gradient(axis_name):
        def run(x, scale, g):
            got = jax.vjp(lambda scale: ops.rms_norm(x, scale, axis_name=axis_name), scale)[1](g)[0]
            return got if axis_name else collectives.psum(got, AXIS)

        return on_ranks(run, 4, (ROWS, ALL, ROWS), ALL)(x, scale, cotangent)

    assert differing(gradient(AXIS), gradient(None))


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one sequence", "five sequences"])
def test_tokens_on_ranks_are_summed_as_on_one_device(segments):
    assert_as_on_one_device(
        lambda values: ops.sum_tokens(values, segments),
        lambda values: ops.sum_tokens(values, segments, axis_name=AXIS),
        (random(0, ROWS_OF_ALL),),
        (ROWS,),
        random(1),
        ALL,
        ranks=(2, 8),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_on_ranks_are_summed_as_on_one_device(dtype):
    assert_as_on_one_device(
        ops.tree_sum,
        lambda parts: ops.tree_sum(parts, axis_name=AXIS),
        (random(0, 32, 5, 7, dtype=dtype),),
        (ROWS,),
        random(1, 5, 7, dtype=dtype),
        ALL,
    )


def test_rows_and_parts_that_ranks_would_share_are_refused():
    with pytest.raises(ShardingError, match="rms_norm adds rows in blocks of 64, got 32 rows a rank over tensor=4"):
        on_ranks(lambda x: ops.rms_norm(x, jnp.ones(16), axis_name=AXIS), 4, ROWS, ROWS)(random(0, 128, 16))
    with pytest.raises(ShardingError, match=r"sum_tokens .* 32 rows a rank"):
        on_ranks(lambda x: ops.sum_tokens(x, axis_name=AXIS), 4, ROWS, ALL)(random(0, 128))
    with pytest.raises(ShardingError, match="3 terms a rank over tensor=2"):
        on_ranks(lambda x: ops.tree_sum(x, axis_name=AXIS), 2, ROWS, ALL)(random(0, 6, 16))


def test_the_norm_of_shards_is_the_norm_of_the_tensors():
    tree = {"up": random(0, 3, 64, 48), "down": random(1, 64, 40), "scale": random(2, 24), "bias": {"b": random(3, 8)}}
    specs = {"up": jax.P(None, AXIS), "down": COLUMNS, "scale": ALL, "bias": ROWS}
    want = global_norm(tree)
    for ranks in (1, 2, 4, 8):
        assert_bit_equal(on_ranks(lambda t: global_norm(t, specs=specs), ranks, (specs,), ALL)(tree), want)


def test_an_update_on_ranks_is_the_update_of_one_device():
    params, grads = ({"w": random(i, 64, 40), "scale": random(i + 1, 24)} for i in (0, 5))
    specs = {"w": COLUMNS, "scale": ALL}
    optimizer = optim.AdamW(lambda step: 1e-3, max_grad_norm=1.0)

    def update(params, grads, specs=None):
        norm = optim.global_norm(grads, specs=specs)
        return optimizer.update(params, grads, optimizer.init(params), grad_norm=norm)[0]

    want = jax.jit(update)(params, grads)
    assert_bit_equal(on_ranks(lambda p, g: update(p, g, specs), 4, (specs, specs), specs)(params, grads), want)


def test_shards_that_cut_a_tile_are_refused():
    run = on_ranks(lambda t: global_norm({"w": t}, specs=ROWS, numerics=Numerics(num_splits=2)), 4, ROWS, ALL)
    with pytest.raises(
        ValueError, match=r"tiles of 16 x 8 of \(32, 16\), which a shard of \(8, 16\) cuts: .*num_splits=2"
    ):
        run(random(0, 32, 16))
