import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import Numerics, Schedule, attention_chunks, kernel, reference, stock
from pallas_kernels.step import Decode
from tests.bits import assert_bit_equal, bits, differing
from tests.pallas_kernels.attention_cases import (
    NUMERICS,
    Sequence,
    in_float64,
    pack,
    pool,
    rows_there,
    run,
    run_decode,
    sequence,
    whole,
)

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
stock_chunks, stock_decode = jax.jit(stock.attention_chunks), jax.jit(stock.attention_decode)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "page_tokens"),
    [(4, 2, 16, 64), (4, 2, 16, 128), (3, 3, 40, 128), pytest.param(16, 2, 256, 128, id="released models")],
)
def test_a_decoded_row_has_the_bits_of_its_chunk_row(heads, kv_heads, width, page_tokens, dtype):
    s = sequence(0, 300, heads, kv_heads, width, dtype)
    positions = np.array([0, 1, 7, 62, 63, 64, 65, 126, 127, 128, 129, 191, 192, 255, 256, 299])
    kv, table = pool([s.until(p + 1) for p in positions], page_tokens=page_tokens)  # Nothing lives past the row.
    decode = Decode(jnp.asarray(positions, jnp.int32), jnp.ones(len(positions), bool))
    assert_bit_equal(run_decode(s.q[positions], kv, table, decode), whole(s)[positions])


@DTYPES
def test_a_decoded_row_does_not_see_its_neighbours_or_how_many_there_are(dtype):
    sequences = [sequence(i, 40 * i + 30, dtype=dtype) for i in range(4)]
    last = np.array([len(s.q) - 1 for s in sequences], np.int32)
    queries = np.stack([s.q[-1] for s in sequences])
    queries[2] = np.nan
    valid = jnp.array([True, True, False, True])
    together = run_decode(queries, *pool(sequences), Decode(jnp.asarray(last), valid))
    for i in (0, 1, 3):
        alone = run_decode(
            queries[i : i + 1], *pool(sequences[i : i + 1]), Decode(jnp.asarray(last[i : i + 1]), jnp.ones(1, bool))
        )
        assert_bit_equal(together[i : i + 1], alone)
    assert not bits(together[2]).any()


@DTYPES
@pytest.mark.parametrize("cuts", [(64, 128), (10, 54, 65, 200), (1, 2, 127, 129, 255)])
def test_pieces_of_a_sequence_have_the_bits_of_the_whole(cuts, dtype):
    s = sequence(2, 300, dtype=dtype)
    pieces = []
    for begin, end in zip((0, *cuts), (*cuts, 300), strict=True):
        q, chunks = pack([s], [(0, begin, end)])
        pieces.append(rows_there(run(q, *pool([s.until(end)]), chunks), chunks))
    assert_bit_equal(np.concatenate(pieces), whole(s))


@DTYPES
@pytest.mark.parametrize("page_tokens", [64, 128])
def test_neighbours_padding_and_page_tables_do_not_change_a_bit(page_tokens, dtype):
    sequences = [sequence(i, tokens, dtype=dtype) for i, tokens in enumerate((70, 300, 5, 128))]
    q, chunks = pack(sequences, [(2, 0, 5), (1, 0, 300), (0, 0, 70), (3, 0, 128)], blocks=12)
    output = run(q, *pool(sequences, page_tokens=page_tokens), chunks)
    want = np.concatenate([whole(sequences[i]) for i in (2, 1, 0, 3)])
    assert_bit_equal(rows_there(output, chunks), want)


@DTYPES
def test_what_is_dead_does_not_reach_what_lives(dtype):
    sequences = [sequence(i, tokens, dtype=dtype) for i, tokens in enumerate((70, 130))]
    results = []
    for dead in (np.nan, np.inf, 0.0):
        q, chunks = pack(sequences, [(0, 10, 70), (1, 0, 130)], dead=dead)
        results.append(run(q, *pool(sequences, dead=dead), chunks))
    assert_bit_equal(results[0], results[2])
    assert_bit_equal(results[1], results[2])
    rows = np.arange(64)
    is_there = (np.asarray(chunks.begin)[:, None] <= rows) & (rows < np.asarray(chunks.end)[:, None])
    assert not bits(results[0])[~is_there].any()
    assert np.isfinite(np.asarray(results[0], np.float32)).all()


def test_a_row_sees_the_tokens_up_to_its_own_and_no_other():
    s = sequence(3, 200)
    changed = Sequence(s.q, s.kv.copy())
    changed.kv[100] += 1
    before, after = whole(s), whole(changed)
    assert_bit_equal(after[:100], before[:100])
    assert all(differing(a, b) for a, b in zip(after[100:], before[100:], strict=True))


@DTYPES
def test_an_integer_pool_is_the_float_pool(dtype):
    s = sequence(4, 150, dtype=dtype)
    kv, table = pool([s])
    q, chunks = pack([s], [(0, 0, 150)])
    stored = jnp.asarray(bits(kv))
    assert_bit_equal(run(q, stored, table, chunks), run(q, kv, table, chunks))
    decode = Decode(jnp.array([149]), jnp.ones(1, bool))
    assert_bit_equal(run_decode(s.q[-1:], stored, table, decode), run_decode(s.q[-1:], kv, table, decode))
    assert_bit_equal(stock_chunks(q, stored, table, chunks), stock_chunks(q, kv, table, chunks))


def test_the_program_around_it_does_not_change_a_bit():
    s = sequence(6, 130)
    q, chunks = pack([s], [(0, 0, 130)])
    kv, table = pool([s])

    @jax.jit
    def inside(q, kv):
        q, kv = q * 1.5 + 0.3, kv * 1.25 + 0.1
        output = run(q, kv, table, chunks)
        return q, kv, output, output * 0.3 + q

    q, kv, output, _ = inside(q, kv)
    assert_bit_equal(output, run(q, kv, table, chunks))


@pytest.mark.parametrize(
    ("numerics", "dtype", "tolerance"),
    [
        (NUMERICS, "float32", 3e-6),
        (NUMERICS, "bfloat16", 2e-2),
        (Numerics(), "float32", 3e-6),
        (Numerics(16, 64), "float32", 3e-6),
    ],
)
def test_the_result_is_softmax_attention(numerics, dtype, tolerance):
    sequences = [sequence(i, tokens, dtype=dtype) for i, tokens in enumerate((300, 70))]
    q, chunks = pack(sequences, [(0, 70, 300), (1, 0, 70)])
    kv, table = pool(sequences)
    want = in_float64(reference.attention_chunks, q, kv, table, chunks)
    for got in (run(q, kv, table, chunks, numerics=numerics), stock_chunks(q, kv, table, chunks)):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance, rtol=0)


def test_the_stock_decode_is_softmax_attention_too():
    sequences = [sequence(i, tokens) for i, tokens in enumerate((300, 70, 9))]
    kv, table = pool(sequences)
    queries = np.stack([s.q[-1] for s in sequences])
    decode = Decode(jnp.array([299, 69, 8]), jnp.array([True, True, False]))
    want = in_float64(reference.attention_decode, queries, kv, table, decode)
    for got in (run_decode(queries, kv, table, decode), stock_decode(queries, kv, table, decode)):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=3e-6, rtol=0)


def test_weights_are_rounded_to_the_compute_dtype_before_they_meet_v():
    """Two tokens of scores 0 and -depth: rounded, the weight of the second cancels what the first's V says."""
    depth = np.array([1.0, 3.0])[:, None]
    kv = np.zeros((2, 2, 2, 16), jnp.bfloat16)
    kv[1, 0, :, :1], kv[:, 1] = -depth, [-np.exp(-depth) + np.zeros(16), np.ones((2, 16))]
    q = np.zeros((2, 4, 16), jnp.bfloat16)
    q[..., 0] = 1
    assert not whole(Sequence(q, kv), scale=1.0)[1].any()


def test_scores_are_scaled_as_asked():
    s = sequence(7, 100)
    asked, default = whole(s, scale=0.1), whole(s)
    assert differing(asked, default)
    assert_bit_equal(whole(s, scale=16**-0.5), default)


def equal_scores(tokens: int) -> tuple[Sequence, np.ndarray]:
    """A sequence whose scores are all zero and whose V are small integers; what its rows attend to, rounded once."""
    values = np.random.default_rng(12).integers(-8, 9, (tokens, 1, 8)).astype(np.float32)
    s = Sequence(np.zeros((tokens, 1, 8), np.float32), np.stack([np.zeros_like(values), values], axis=1))
    return s, np.cumsum(values, axis=0) / np.arange(1, tokens + 1, dtype=np.float32)[:, None, None]


def test_equal_scores_give_the_mean_rounded_once():
    s, mean = equal_scores(64)
    assert_bit_equal(whole(s), mean)
    kv, table = pool([s.until(i + 1) for i in range(64)])
    assert_bit_equal(run_decode(s.q, kv, table, Decode(jnp.arange(64), jnp.ones(64, bool))), mean)


def test_control_a_plain_quotient_is_not_rounded_once(monkeypatch):
    """XLA makes `a / broadcast(b)` a product with a reciprocal."""
    monkeypatch.setattr(kernel, "exact_quotient", lambda a, b: a / b)
    s, mean = equal_scores(64)
    assert differing(whole(s, scale=0.25), mean)  # A scale of its own: nothing traced before is met.


def test_a_pool_is_read_where_it_lies():
    s = sequence(8, 100)
    q, chunks = pack([s], [(0, 0, 100)])
    kv, table = pool([s], pages=4000)
    for program in (
        run.lower(q, kv, table, chunks),
        run_decode.lower(s.q[-1:], kv, table, Decode(jnp.array([99]), jnp.ones(1, bool))),
    ):
        assert program.compile().memory_analysis().temp_size_in_bytes < kv.nbytes / 20


@pytest.mark.parametrize("numerics", [Numerics(kv_split=64), Numerics(kv_split=256), Numerics(32, 128)])
def test_control_other_numerics_are_other_bits(numerics):
    s = sequence(9, 300)
    assert differing(whole(s, numerics=numerics), whole(s))


def test_control_the_order_of_splits_decides_bits():
    """Splits exchanged, tokens and all, are the same sum for a row past them, met in another order."""
    s = sequence(10, 256)
    exchanged = Sequence(s.q, np.concatenate([s.kv[128:192], s.kv[64:128], s.kv[:64], s.kv[192:]]))
    a, b = (whole(s, numerics=Numerics(kv_split=64))[192:] for s in (s, exchanged))
    np.testing.assert_allclose(a, b, atol=3e-6, rtol=0)
    assert differing(a, b)


def test_control_a_stock_row_depends_on_its_program():
    s = sequence(11, 300, width=64)
    q, chunks = pack([s], [(0, 0, 300)])
    kv, table = pool([s])
    rows = rows_there(stock_chunks(q, kv, table, chunks), chunks)
    decode = Decode(jnp.arange(300), jnp.ones(300, bool))
    one_by_one = stock_decode(s.q, kv, np.repeat(table, 300, 0), decode)
    assert differing(one_by_one, rows)


def arguments(**changes):
    s = sequence(0, 64)
    q, chunks = pack([s], [(0, 0, 64)], dead=0.0)
    kv, table = pool([s], dead=0.0)
    return jax.tree.map(jnp.asarray, {"q": q, "kv": kv, "kv_pages": table, "chunks": chunks} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((1, 64, 4, 16), np.float16)}, "computes in bfloat16 or float32, got q float16"),
        ({"kv": np.zeros((4, 2, 2, 64, 16), jnp.bfloat16)}, "reads kv float32 or uint32, got bfloat16"),
        ({"kv": np.zeros((4, 2, 2, 64, 16), np.uint16)}, "reads kv float32 or uint32, got uint16"),
        ({"kv": np.zeros((4, 2, 3, 64, 16), np.float32)}, "whole group of query heads"),
        ({"kv": np.zeros((4, 2, 2, 48, 16), np.float32)}, "got 48 tokens: round pages up"),
        ({"kv_pages": np.zeros((2, 2), np.int32)}, "page tables of 2 sequences for 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        attention_chunks(**arguments(**changes))


def test_a_gradient_of_an_integer_pool_is_refused():
    given = arguments(kv=np.zeros((4, 2, 2, 64, 16), np.uint32))
    with pytest.raises(ValueError, match="needs a float kv, got uint32"):
        jax.grad(lambda q: attention_chunks(**given | {"q": q}).sum())(given["q"])


@pytest.mark.parametrize("make", [lambda: Numerics(128), lambda: Numerics(32, 96), lambda: Schedule(8)])
def test_numerics_and_schedules_without_proof_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make()
