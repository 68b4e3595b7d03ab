import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from isojax.layouts import Segments
from pallas_kernels.cast import cast
from pallas_kernels.embedding import Schedule, embed, reference, stock
from tests.bits import assert_bit_equal, differing

WORDS, WIDTH = 40, 96
BLOCKS = [0, 0, 1, 2, 3, 5]  # The sequence of each block; sequence 4 is absent.
ROWS = 64 * len(BLOCKS)
SEGMENTS = Segments(jnp.asarray(BLOCKS, jnp.int32), 6)


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def tokens(rows, words=WORDS):
    return jax.random.randint(jax.random.key(9), (rows,), 0, words, jnp.int32)


def gradient(tokens, cotangent, segments, words=WORDS, **options):
    table = jnp.zeros((words, cotangent.shape[1]))
    run = jax.jit(lambda t: embed(tokens, t, dtype=cotangent.dtype, segments=segments, **options))
    return jax.vjp(run, table)[1](cotangent)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_is_a_rounded_row_of_the_table_in_any_company(dtype):
    table, words = random(0, WORDS, WIDTH), tokens(130)
    want = reference.embed(words, table, dtype=dtype)
    for rows in (1, 7, 33, 64, 65, 130):
        assert_bit_equal(jax.jit(lambda t, r=rows: embed(words[:r], t, dtype=dtype))(table), want[:rows])
    assert_bit_equal(embed(words, cast(table, dtype), dtype=dtype), want)


def test_a_word_beyond_the_table_is_not_a_number():
    rows = embed(jnp.asarray([0, WORDS, -1], jnp.int32), random(0, WORDS, WIDTH), dtype="float32")
    np.testing.assert_array_equal(np.isnan(rows).all(axis=1), [False, True, True])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("words", [3, WORDS])
def test_the_gradient_has_the_bits_of_the_reference(words, dtype):
    cotangent, ids = random(1, ROWS, WIDTH, dtype=dtype), tokens(ROWS, words)
    want = reference.table_gradient(ids, cotangent, WORDS, SEGMENTS)
    assert_bit_equal(gradient(ids, cotangent, SEGMENTS), want)
    assert_bit_equal(gradient(ids, cotangent, SEGMENTS, schedule=Schedule(128)), want)


def test_the_gradient_is_the_fold_of_the_gradients_of_the_sequences():
    cotangent, ids = random(1, ROWS, WIDTH), tokens(ROWS)
    rows, alone = np.repeat(BLOCKS, 64), []
    for sequence in range(6):
        here = rows == sequence
        if here.any():
            alone.append(gradient(ids[here], cotangent[here], Segments.one(int(here.sum()))))
        else:
            alone.append(jnp.zeros((WORDS, WIDTH)))
    assert_bit_equal(gradient(ids, cotangent, SEGMENTS), trees.fold(jnp.add, alone))
    assert differing(gradient(ids, cotangent, SEGMENTS), trees.chain(jnp.add, alone))


def test_rows_that_are_not_there_change_nothing():
    cotangent, ids = random(1, ROWS, WIDTH).at[60:64].set(0), tokens(ROWS)
    want = gradient(ids, cotangent, SEGMENTS)
    assert_bit_equal(gradient(ids.at[60:64].set(0), cotangent, SEGMENTS), want)


def test_a_rounded_table_gets_a_rounded_gradient():
    cotangent, ids = random(1, ROWS, WIDTH, dtype="bfloat16"), tokens(ROWS)
    run = jax.jit(lambda t: embed(ids, t, dtype=t.dtype, segments=SEGMENTS))
    (grad,) = jax.vjp(run, jnp.zeros((WORDS, WIDTH), jnp.bfloat16))[1](cotangent)
    assert_bit_equal(grad, cast(gradient(ids, cotangent, SEGMENTS), jnp.bfloat16))


def test_the_stock_gradient_has_other_bits():
    cotangent, ids = random(1, ROWS, WIDTH), tokens(ROWS, 3)
    (stock_grad,) = jax.vjp(lambda t: stock.embed(ids, t, dtype="float32"), jnp.zeros((WORDS, WIDTH)))[1](cotangent)
    exact = gradient(ids, cotangent, SEGMENTS)
    np.testing.assert_allclose(stock_grad, exact, atol=1e-4)
    assert differing(stock_grad, exact)


def test_autodiff_adds_nothing_outside_the_region():
    grad = jax.make_jaxpr(lambda c: gradient(tokens(128), c, Segments.one(128)))(random(1, 128, WIDTH))
    assert "scatter" not in str(grad)
    assert "add_any" not in str(grad)


def test_segments_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="65 rows, which are 2 blocks"):
        embed(tokens(65), random(0, WORDS, WIDTH), dtype="float32", segments=Segments.one(64))


def test_a_batch_of_2048_rows_is_cheap():
    cotangent, ids = random(1, 2048, 128), tokens(2048, 512)
    segments = Segments(jnp.arange(32, dtype=jnp.int32) // 4, 8)
    table = jnp.zeros((512, 128))
    run = jax.jit(lambda t, c: jax.vjp(lambda t: embed(ids, t, dtype="float32", segments=segments), t)[1](c)[0])
    jax.block_until_ready(run(table, cotangent))
    start = time.perf_counter()
    jax.block_until_ready(run(table, cotangent))
    assert time.perf_counter() - start < 1.0  # About 10 ms alone.
