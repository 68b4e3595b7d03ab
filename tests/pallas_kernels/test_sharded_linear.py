"""Linear layers and collectives on the ranks of a mesh axis: the bits of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from isojax import collectives, trees
from isojax.errors import ShardingError
from isojax.layouts import Segments
from pallas_kernels.collectives import Schedule
from pallas_kernels.linear import Numerics, column_linear, row_linear
from tests.bits import assert_bit_equal, differing
from tests.pallas_kernels.meshes import ALL, AXIS, COLUMNS, RANKS, ROWS, assert_as_on_one_device, on_ranks

DTYPES = ["bfloat16", "float32"]


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def two_sequences(rows):
    blocks = rows // 64
    return Segments(jnp.asarray(np.arange(blocks) >= blocks // 2 + 1, jnp.int32), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["replicated", "sharded"])
def test_a_column_parallel_layer_has_the_bits_of_one_device(rows, dtype):
    sharded = rows == "sharded"
    x = random(0, 256, 96, dtype=dtype)
    weights = (random(1, 48, 96), random(2, 24, 96))  # 24 outputs over 8 ranks: splits of 3.
    cotangent = (random(3, 256, 48, dtype=dtype), random(4, 256, 24))
    kept = {"out_dtypes": (None, jnp.float32), "segments": two_sequences(256)}
    assert_as_on_one_device(
        lambda x, weights: column_linear(x, weights, **kept),
        lambda x, w: column_linear(x, w, axis_name=AXIS, gather_axis=0 if sharded else None, **kept),
        (x, weights),
        (ROWS if sharded else ALL, (ROWS, ROWS)),
        cotangent,
        (COLUMNS, COLUMNS),
        ranks=RANKS if dtype == "float32" else (8,),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["replicated", "scattered"])
def test_a_row_parallel_layer_has_the_bits_of_one_device(rows, dtype):
    scattered = rows == "scattered"
    x, weight = random(0, 256, 160, dtype=dtype), random(1, 72, 160)
    segments = two_sequences(256)
    assert_as_on_one_device(
        lambda x, w: row_linear(x, w, segments=segments),
        lambda x, w: row_linear(x, w, axis_name=AXIS, scatter_axis=0 if scattered else None, segments=segments),
        (x, weight),
        (COLUMNS, COLUMNS),
        random(2, 256, 72, dtype=dtype),
        ROWS if scattered else ALL,
        ranks=RANKS if dtype == "float32" else (8,),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_weights_over_sharded_rows_have_the_gradients_of_one_device(dtype):
    # With one output there is no run for every rank: all ranks make the whole gradient.
    x, weights = random(0, 512, 96, dtype=dtype), (random(1, 48, 96), random(2, 1, 96))
    kept = {"out_dtypes": (None, jnp.float32), "segments": two_sequences(512)}
    assert_as_on_one_device(
        lambda x, weights: column_linear(x, weights, **kept),
        lambda x, weights: column_linear(x, weights, rows_axis_name=AXIS, **kept),
        (x, weights),
        (ROWS, (ALL, ALL)),
        (random(3, 512, 48, dtype=dtype), random(4, 512, 1)),
        (ROWS, ROWS),
        ranks=RANKS if dtype == "float32" else (8,),
    )


def test_weight_gradients_of_ranks_added_afterwards_are_another_sum():
    """Negative control: the chain of a sequence goes on over ranks."""
    x, weight, cotangent = random(0, 512, 96), random(1, 48, 96), random(3, 512, 48)

    def gradient(axis_name):
        def run(x, weight, g):
            (grad,) = jax.vjp(lambda w: column_linear(x, (w,), rows_axis_name=axis_name)[0], weight)[1](g)
            return grad if axis_name else collectives.psum(grad, AXIS)

        return on_ranks(run, 4, (ROWS, ALL, ROWS), ALL)(x, weight, cotangent)

    assert differing(gradient(AXIS), gradient(None))


def test_any_number_of_rows_may_be_replicated():
    x, weight = random(0, 7, 64), random(1, 16, 64)
    want = jax.jit(row_linear)(x, weight)
    run = on_ranks(lambda x, w: row_linear(x, w, axis_name=AXIS), 4, (COLUMNS, COLUMNS), ALL)
    assert_bit_equal(run(x, weight), want)


def test_one_device_without_an_axis_is_an_axis_of_one():
    x, weight = random(0, 70, 64), random(1, 16, 64)
    run = on_ranks(lambda x, w: row_linear(x, w, axis_name=AXIS, scatter_axis=0), 1, (COLUMNS, COLUMNS), ALL)
    assert_bit_equal(run(x, weight), jax.jit(row_linear)(x, weight))


@pytest.mark.parametrize("op", ["row_linear", "column_linear"])
@pytest.mark.parametrize(("num_splits", "ranks"), [(4, 8), (6, 4), (6, 2)])
def test_ranks_that_hold_no_whole_subtree_are_refused(op, num_splits, ranks):
    numerics = Numerics(num_splits=num_splits, gradient_splits=num_splits)

    def run(x, w):
        if op == "row_linear":
            return row_linear(x, w, axis_name=AXIS, numerics=numerics)
        return column_linear(x, (w,), axis_name=AXIS, numerics=numerics)[0]

    specs = (COLUMNS, COLUMNS) if op == "row_linear" else (ALL, ROWS)
    setting = "num_splits" if op == "row_linear" else "gradient_splits"
    message = f"{op}: {setting}={num_splits} does not divide over tensor={ranks} .* shard over 1 or "
    with pytest.raises(ShardingError, match=message):
        on_ranks(run, ranks, specs, ALL if op == "row_linear" else COLUMNS)(random(0, 8, 96), random(1, 96, 96))


def test_other_refusals_say_what_came():
    x, weight = random(0, 12, 64), random(1, 16, 64)
    run = on_ranks(lambda x, w: row_linear(x, w, axis_name=AXIS, scatter_axis=0), 8, (COLUMNS, COLUMNS), ROWS)
    with pytest.raises(ShardingError, match=r"12 rows, .* tensor=8: pad them to 16"):
        run(x, weight)
    with pytest.raises(ValueError, match="72 inputs into num_splits=16"):
        on_ranks(lambda x, w: row_linear(x, w, axis_name=AXIS, numerics=Numerics(16)), 2, (COLUMNS, COLUMNS), ALL)(
            random(0, 8, 72), random(1, 16, 72)
        )
    with pytest.raises(ValueError, match="gather_axis=0 with axis_name=None"):
        column_linear(x, (weight,), gather_axis=0)
    with pytest.raises(ValueError, match=r"axis_name='tensor' and rows_axis_name='tensor': weights are either"):
        column_linear(x, (weight,), axis_name=AXIS, rows_axis_name=AXIS)
    with pytest.raises(ShardingError, match="column_linear adds rows in blocks of 64, got 6 rows a rank over tensor=2"):
        on_ranks(lambda x, w: column_linear(x, (w,), rows_axis_name=AXIS), 2, (ROWS, ALL), ROWS)(x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", [Schedule(), Schedule(one_shot=0)])
def test_psum_is_the_tree_over_ranks_however_terms_travel(schedule, dtype):
    terms = random(0, 8, 5, 33, dtype=dtype)
    want = jax.jit(lambda t: trees.fold(jnp.add, list(t.astype(jnp.float32))).astype(dtype))(terms)
    run = on_ranks(lambda t: collectives.psum(t[0], AXIS, schedule=schedule), 8, ROWS, ALL)
    assert_bit_equal(run(terms), want)


def test_lax_psum_has_other_bits():
    """Negative control: what XLA adds in the place of `collectives.psum`."""
    terms = random(0, 8, 5, 33)
    ours, theirs = (
        on_ranks(lambda t, add=add: add(t[0], AXIS), 8, ROWS, ALL)(terms) for add in (collectives.psum, lax.psum)
    )
    assert differing(ours, theirs)


def test_psum_takes_trees_and_adds_integers():
    run = on_ranks(lambda t: collectives.psum({"n": t["n"][0], "x": t["x"][0]}, AXIS), 4, ROWS, ALL)
    got = run({"n": jnp.arange(4), "x": jnp.ones((4, 3))})
    assert int(got["n"]) == 6
    assert got["x"].tolist() == [4, 4, 4]


def test_reduce_scatter_leaves_pieces_of_psum_and_all_gather_joins_them():
    terms = random(0, 8, 6, 16)

    def both(t):
        pieces = collectives.reduce_scatter(t[0], AXIS, axis=-1)
        return collectives.psum(t[0], AXIS), collectives.all_gather(pieces, AXIS, axis=-1)

    psum, joined = on_ranks(both, 8, ROWS, ALL)(terms)
    assert_bit_equal(joined, psum)
    run = on_ranks(lambda t: collectives.reduce_scatter(t[0], AXIS), 4, ROWS, ROWS)
    with pytest.raises(ShardingError, match=r"piece of 6 entries.* tensor=4"):
        run(terms[:4])


def test_cotangents_keep_their_bits_through_collectives():
    x, weight = random(0, 8, 4), random(1, 8, 4)

    def run(x, weight):
        value, pull = jax.vjp(lambda x: collectives.psum(x, AXIS), x)
        (of_psum,) = pull(weight[:1] * 0 + value)
        _, pull = jax.vjp(lambda x: collectives.all_gather(x, AXIS), x)
        (of_gather,) = pull(collectives.all_gather(weight, AXIS))
        _, pull = jax.vjp(lambda x: collectives.reduce_scatter(x, AXIS), collectives.all_gather(x, AXIS))
        (of_scatter,) = pull(weight)
        return value, of_psum, of_gather, of_scatter

    value, of_psum, of_gather, of_scatter = on_ranks(run, 8, (ROWS, ROWS), (ALL, ROWS, ROWS, ALL))(x, weight)
    assert_bit_equal(of_psum, jnp.broadcast_to(value, (8, 4)))
    assert_bit_equal(of_gather, weight)
    assert_bit_equal(of_scatter, weight)


def test_a_gather_outside_the_op_rounds_the_input_gradient_on_every_rank():
    """Negative control: why `gather_axis` is part of the op."""
    x, weight, cotangent = random(0, 256, 64, dtype="bfloat16"), random(1, 64, 64), random(2, 256, 64, dtype="bfloat16")

    def inside(x, w):
        return column_linear(x, (w,), axis_name=AXIS, gather_axis=0)[0]

    def outside(x, w):
        return column_linear(lax.all_gather(x, AXIS, tiled=True), (w,))[0]

    def gradient(fn):
        return on_ranks(lambda x, w, g: jax.vjp(fn, x, w)[1](g)[0], 4, (ROWS, ROWS, COLUMNS), ROWS)(
            x, weight, cotangent
        )

    assert differing(gradient(inside), gradient(outside)) > 1000


def test_weight_gradients_of_data_parallel_ranks_meet_in_psum():
    """Ranks that hold aligned runs of sequences: the tree over sequences goes on over ranks."""
    x, g, weight = random(0, 8 * 64, 32), random(1, 8 * 64, 16), random(2, 16, 32)

    def gradient(x, g, weight, sequences):
        segments = Segments(jnp.arange(sequences, dtype=jnp.int32), sequences)
        return jax.vjp(lambda w: column_linear(x, (w,), segments=segments)[0], weight)[1](g)[0]

    want = jax.jit(gradient, static_argnums=3)(x, g, weight, 8)
    for ranks in (2, 8):
        run = on_ranks(
            lambda x, g, w, n=8 // ranks: collectives.psum(gradient(x, g, w, n), AXIS), ranks, (ROWS, ROWS, ALL), ALL
        )
        assert_bit_equal(run(x, g, weight), want)
