import jax
import numpy as np
import pytest

from pallas_kernels.attention import Schedule, stock
from tests.bits import assert_bit_equal, bits
from tests.pallas_kernels.attention_cases import batch, pack, pool, rows_there, sequence, with_gradients

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("begins", [(0, 0, 0), (84, 0, 10)])
def test_gradients_are_those_of_softmax_attention(begins, dtype, tolerance):
    sequences = [sequence(i, tokens, dtype=dtype) for i, tokens in enumerate((200, 0, 70))]
    q, kv, table, chunks = batch(sequences, begins)
    cotangent = np.asarray(np.random.default_rng(9).standard_normal(q.shape), q.dtype)
    got = with_gradients(q, kv, table, chunks, cotangent)
    with jax.enable_x64(True):
        wide = (x.astype(np.float64) for x in (q, kv))
        want = with_gradients(*wide, table, chunks, cotangent.astype(np.float64), op=stock.attention_chunks)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == q.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b), atol=tolerance, rtol=0)


@DTYPES
@pytest.mark.parametrize("page_tokens", [64, 128])
def test_gradients_of_a_sequence_do_not_change_with_its_batch(page_tokens, dtype):
    """Other sequences, padding, NaN where nothing lives, page tables: none reaches a gradient bit."""
    sequences = [sequence(i, tokens, dtype=dtype) for i, tokens in enumerate((150, 70, 64))]
    cotangents = [sequence(10 + i, len(s.q), dtype=dtype) for i, s in enumerate(sequences)]

    def gradients(tokens, **options):
        """dQ and dKV by token of the batch that holds so many tokens of each sequence, and dKV where nothing lives."""
        q, kv, table, chunks = batch([s.until(n) for s, n in zip(sequences, tokens, strict=True)], **options)
        cotangent, *_ = batch([s.until(n) for s, n in zip(cotangents, tokens, strict=True)])
        _, of_q, of_kv = (np.asarray(x) for x in with_gradients(q, kv, table, chunks, cotangent))
        by_token = of_kv[table].transpose(0, 1, 4, 2, 3, 5).reshape(3, -1, *sequences[0].kv.shape[1:])
        by_token = np.concatenate([rows[:n] for rows, n in zip(by_token, tokens, strict=True)])
        return rows_there(of_q, chunks), by_token, of_kv[np.isnan(kv)]

    *together, dead = gradients((150, 70, 64), page_tokens=page_tokens, seed=1)
    alone = [gradients(tokens)[:2] for tokens in ((150, 0, 0), (0, 70, 0), (0, 0, 64))]
    assert_bit_equal(together, [np.concatenate(parts) for parts in zip(*alone, strict=True)])
    assert not bits(dead).any()


def test_a_page_of_two_sequences_has_no_gradient_to_rely_on():
    q, kv, table, chunks = batch([sequence(i, tokens) for i, tokens in enumerate((64, 64, 0))])
    table[1] = table[0]
    _, of_q, of_kv = with_gradients(q, kv, table, chunks, q)
    assert np.isfinite(of_q).all()
    assert np.isnan(of_kv[table[0, 0]]).all()


@pytest.mark.parametrize("heads", [1, 2])
def test_every_schedule_gives_the_same_bits(heads):
    s = sequence(5, 300, heads=8)
    q, chunks = pack([s], [(0, 0, 300)])
    kv, table = pool([s])
    want, got = (
        with_gradients(q, kv, table, chunks, q, schedule=schedule) for schedule in (Schedule(), Schedule(heads))
    )
    assert_bit_equal(got, want)
