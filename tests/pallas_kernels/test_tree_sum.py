import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from isojax.layouts import Segments
from pallas_kernels.tree_sum import Schedule, fold_axis, reference, stock, sum_tokens, tree_sum
from tests.bits import assert_bit_equal, differing


def random_parts(*shape, dtype="float32"):
    return jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 13])
def test_every_schedule_gives_the_bits_of_the_reference(count, dtype):
    parts = random_parts(count, 300, dtype=dtype)
    want = reference.tree_sum(parts)
    for block in (128, 256):
        assert_bit_equal(jax.jit(lambda parts, b=block: tree_sum(parts, schedule=Schedule(b)))(parts), want)


def test_a_level_at_a_time_is_the_tree_of_trees_fold():
    for count in (1, 2, 3, 5, 6, 7, 9, 11, 13, 31, 33, 63):
        parts = random_parts(count, 40)
        got = jax.jit(lambda parts: fold_axis(parts, 0))(parts)
        assert_bit_equal(got[0], trees.fold(np.add, list(np.asarray(parts))))


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_aligned_shards_recombine_to_the_same_bits(shards):
    parts = random_parts(16, 500)
    partial_sums = jnp.stack([tree_sum(shard) for shard in jnp.split(parts, shards)])
    assert_bit_equal(tree_sum(partial_sums), tree_sum(parts))


def test_parts_may_be_scalars_and_many():
    parts = random_parts(8_191)
    assert_bit_equal(jax.jit(tree_sum)(parts), trees.fold(np.add, list(np.asarray(parts))))


def test_another_order_is_another_sum():
    parts = random_parts(13, 300)
    assert differing(tree_sum(parts), tree_sum(parts[::-1]))
    assert differing(tree_sum(parts), trees.chain(jnp.add, list(parts)))


def test_the_cotangent_reaches_every_part_untouched():
    parts, cotangent = random_parts(5, 6), random_parts(6)
    (grad,) = jax.vjp(tree_sum, parts)[1](cotangent)
    assert_bit_equal(grad, np.stack([cotangent] * 5))


def test_integers_and_empty_sums_are_refused():
    with pytest.raises(ValueError, match="cast the parts"):
        tree_sum(jnp.ones((2, 3), jnp.float16))
    with pytest.raises(ValueError, match="pass a zero"):
        tree_sum(jnp.ones((0, 3)))


LENGTHS = [70, 1, 64, 200, 130]  # Tokens of five sequences, each padded with zeros to the 64-token grid.


def packed(order, count):
    values, sequence = [], []
    for index in order:
        length = LENGTHS[index]
        row = jax.random.normal(jax.random.key(index), (length,))
        values.append(jnp.pad(row, (0, -length % 64)))
        sequence += [index] * (len(values[-1]) // 64)
    return jnp.concatenate(values), Segments(jnp.asarray(sequence, jnp.int32), count)


def test_the_sum_of_tokens_has_the_bits_of_the_reference():
    values, segments = packed(range(5), 5)
    assert_bit_equal(jax.jit(sum_tokens)(values, segments), reference.sum_tokens(values, segments))


def test_where_a_sequence_lies_in_the_batch_changes_nothing():
    want = jax.jit(sum_tokens)(*packed(range(5), 5))
    assert_bit_equal(jax.jit(sum_tokens)(*packed([3, 0, 4, 2, 1], 5)), want)


def test_micro_batches_of_an_aligned_run_are_subtrees():
    want = jax.jit(sum_tokens)(*packed(range(4), 4))
    halves = []
    for start in (0, 2):
        values, segments = packed(range(start, start + 2), 4)
        halves.append(jax.jit(sum_tokens)(values, Segments(segments.sequence - start, 2)))
    assert_bit_equal(halves[0] + halves[1], want)


def test_the_stock_sum_knows_no_sequences():
    values, segments = packed(range(5), 5)
    swapped, _ = packed([3, 0, 4, 2, 1], 5)
    scales = (1.0, 1.1, 1.3, 1.7, 1.9)  # One sum of two orders may agree by chance.
    sums = [[stock.sum_tokens(scale * v, segments) for scale in scales] for v in (values, swapped)]
    assert differing(*map(jnp.stack, sums))


def test_the_gradient_of_the_sum_of_tokens_is_its_cotangent():
    values, segments = packed(range(5), 5)
    grad = jax.grad(lambda v: 0.3 * sum_tokens(v, segments))(values)
    assert_bit_equal(grad, np.full(values.shape, 0.3, np.float32))


def test_segments_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="segments of the batch"):
        sum_tokens(jnp.ones(65), Segments.one(64))
