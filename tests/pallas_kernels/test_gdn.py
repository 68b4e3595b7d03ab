import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gdn
from pallas_kernels.gdn import Numerics, Schedule, arithmetic, stock
from pallas_kernels.gdn import decode as decode_kernels
from pallas_kernels.step import Chunks, Decode
from tests.bits import assert_bit_equal, differing
from tests.pallas_kernels.gdn_cases import (
    BLOCKS,
    chunk_form,
    in_pieces,
    no_state,
    oracle,
    present,
    row_form,
    sequence,
    slots_of,
    token_by_token,
    whole,
)
from tests.pallas_kernels.pieces import packed, unpacked

dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
LENGTHS = (1, 63, 64, 65, 130, 200)


def prefix(rows, length):
    return tuple(x[:length] for x in rows)


@dtypes
def test_pieces_cut_anywhere_have_the_bits_of_the_whole(dtype):
    rows = sequence(200, dtype)
    want = whole(rows)
    for cuts in ([63], [64], [65], [1, 2], [20, 40, 64, 100, 129], [127, 128, 192, 199]):
        o, state, opened = in_pieces(rows, cuts)
        assert_bit_equal((o, state), want[:2])
        assert_bit_equal(present(opened, 0, 200), present(want[2], 0, 200))


@dtypes
def test_b056_decode_token_by_token_has_the_bits_of_whole_chunks(dtype):
    """B056: one definition for trainer and engine. Rows of requests that have ended are NaN."""
    sequences = [sequence(length, dtype, seed) for seed, length in enumerate(LENGTHS)]
    outputs, state, slots = token_by_token(sequences)
    for i, rows in enumerate(sequences):
        o, want_state, opened = whole(rows)
        assert_bit_equal((outputs[i], state[i]), (o, want_state[0]))
        assert_bit_equal(present(slots, i, len(o)), present(opened, 0, len(o)))


@pytest.mark.parametrize("sizes", [(1, 3, 128, 128), (2, 2, 64, 16)])
def test_other_heads_and_widths_have_the_same_bits_in_both_forms(sizes):
    rows = sequence(66, "bfloat16", sizes=sizes)
    outputs, state, _ = token_by_token([rows])
    assert_bit_equal((outputs[0], state), whole(rows)[:2])


@dtypes
def test_b053_prefill_of_t_tokens_equals_prefill_of_t_minus_1_and_one_decode_step(dtype):
    """B053: rows that pad a chunk update neither its state nor its rows."""
    rows = sequence(140, dtype)
    want = whole(rows)[0]
    for length in [*range(2, 141, 3), 63, 64, 65, 128, 129]:
        o, state, opened = in_pieces(prefix(rows, length - 1), [])
        decode = Decode(jnp.asarray([length - 1], jnp.int32), jnp.ones(1, bool))
        token = tuple(x[length - 1 : length] for x in rows)
        last, state, _ = row_form(token, decode, opened, jnp.zeros(1, jnp.int32), state)
        assert_bit_equal((o, np.asarray(last[0])), (want[: length - 1], want[length - 1]))
        assert_bit_equal(state, whole(prefix(rows, length))[1])


@dtypes
def test_b067_sequences_do_not_see_each_other_nor_padding(dtype):
    """B067: rows that are absent hold NaN."""
    sequences = [sequence(length, dtype, seed) for seed, length in enumerate(LENGTHS)]
    blocked, chunks = packed(sequences, blocks=14, num_sequences=7)
    state = no_state(7).at[6].set(3.0)
    o, after, opened = chunk_form(blocked, chunks, state)
    for i, (got, rows) in enumerate(zip(unpacked(o, chunks), sequences, strict=True)):
        want, want_state, want_open = whole(rows)
        assert np.isfinite(want.astype(np.float32)).all()
        assert_bit_equal((got, after[i]), (want, want_state[0]))
        assert_bit_equal(jax.tree.map(lambda x, i=i: x[i], opened), jax.tree.map(lambda x: x[0], want_open))
    row = np.arange(64)
    absent = (row < np.asarray(chunks.begin)[:, None]) | (row >= np.asarray(chunks.end)[:, None])
    assert not np.asarray(o, np.float32)[absent].any()
    assert_bit_equal(after[6], state[6])  # A sequence without a block keeps what it had.


def test_a_new_sequence_starts_from_zero_whatever_its_page_and_slot_held():
    rows = sequence(70)
    blocked, chunks = packed([rows], blocks=BLOCKS)
    stale = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (no_state(), slots_of(gdn, 1, "float32")))
    assert_bit_equal(chunk_form(blocked, chunks, *stale)[:2], chunk_form(blocked, chunks, no_state())[:2])
    token, slot = tuple(x[:1] for x in rows), jnp.zeros(1, jnp.int32)
    decode = Decode(jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
    o, state, _ = row_form(token, decode, stale[1], slot, stale[0])
    assert_bit_equal((np.asarray(o[0]), state), (whole(prefix(rows, 1))[0][0], no_state()))


def test_rows_that_are_not_valid_write_nothing():
    slots = jax.tree.map(lambda x: jnp.full_like(x, 2), slots_of(gdn, 2, "float32"))
    rows = tuple(x[:2] for x in sequence(2))
    decode = Decode(jnp.asarray([63, 63], jnp.int32), jnp.zeros(2, bool))
    o, _, after = row_form(rows, decode, slots, jnp.asarray([0, 1], jnp.int32), no_state(2))
    assert not np.asarray(o).any()
    assert_bit_equal(after, slots)


def test_schedules_and_the_number_of_local_heads_change_no_bit():
    blocked, chunks = packed([sequence(130)], padding=0)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(blocked[2].shape), jnp.float32)

    def run(blocked, cotangent, schedule):
        state = no_state()[:, : blocked[2].shape[2]]
        of = functools.partial(gdn.gdn_chunks, chunks=chunks, state=state, schedule=schedule)
        o, pull = jax.vjp(lambda *rows: of(*rows)[0], *blocked)
        return (o, *pull(cotangent))

    run = jax.jit(run, static_argnames="schedule")
    want = run(blocked, cotangent, Schedule())
    assert_bit_equal(run(blocked, cotangent, Schedule(key_heads=1)), want)
    first = [(x[:, :, :1] if i < 2 else x[:, :, :2]) for i, x in enumerate(blocked)]
    part = run(first, cotangent[:, :, :2], Schedule())
    assert_bit_equal(part, tuple(w[:, :, : p.shape[2]] for w, p in zip(want, part, strict=True)))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 8e-3), ("float32", 2e-6)])
def test_outputs_and_states_agree_with_the_float64_recurrence(dtype, tolerance):
    rows = sequence(192, dtype)
    for got, want in zip(whole(rows)[:2], oracle(rows), strict=True):
        assert np.linalg.norm(np.asarray(got, np.float64) - want) < tolerance * np.linalg.norm(want)


def test_strong_decay_overflows_nowhere():
    rows = sequence(130, decay=40.0)
    o, state, _ = whole(rows)
    want, _ = oracle(rows)
    assert np.linalg.norm(o - want) < 1e-5 * np.linalg.norm(want)
    assert np.isfinite(state).all()
    blocked, chunks = packed([rows], blocks=BLOCKS)
    assert all(np.isfinite(g).all() for g in gradients(blocked, chunks, jnp.ones_like(blocked[2])))


def test_the_inverse_is_the_chain_of_rounded_products_in_ascending_order():
    rng = np.random.default_rng(0)
    a = np.tril(rng.standard_normal((3, 64, 64)).astype(np.float32) / 4, -1)
    want = np.broadcast_to(np.eye(64, dtype=np.float32), a.shape)
    for j in range(63):
        want = want - a[:, :, j : j + 1] * want[:, j : j + 1]
    assert_bit_equal(jax.jit(arithmetic.unit_inverse)(jnp.asarray(a)), want)


# Negative controls: each breaks one thing that the bits rest on and sees the comparison of decode with chunks fail.


def decode_differs(monkeypatch, dtype, name, broken):
    """Whether decode with `broken` in place of `name` leaves the bits of whole chunks."""
    monkeypatch.setattr(decode_kernels, name, broken)

    @functools.partial(jax.jit, static_argnames="op")
    def step(rows, decode, slots, slot, state, op):
        return row_form.__wrapped__(rows, decode, slots, slot, state, op)

    rows = sequence(70, dtype)
    return differing(token_by_token([rows], step)[0][0], whole(rows)[0])


def test_another_order_of_subtractions_is_seen(monkeypatch):
    def descending(a, t, row, count):
        unit = jnp.where(jax.lax.broadcasted_iota(jnp.int32, a.shape, 1) == row, 1.0, 0.0)

        def subtract(j, x):
            j = count - 1 - j
            column = jax.lax.dynamic_slice_in_dim(a, j, 1, 1)
            return x - arithmetic.exact_product(column, jax.lax.dynamic_slice_in_dim(t, j, 1, 1)[:, 0])

        return jax.lax.fori_loop(0, count, subtract, unit)

    assert decode_differs(monkeypatch, "float32", "inverse_row", descending)


def test_a_contracted_subtraction_is_seen(monkeypatch):
    monkeypatch.setattr(arithmetic, "exact_product", lambda a, b: a * b)
    assert decode_differs(monkeypatch, "float32", "inverse_row", arithmetic.inverse_row)


def test_a_rounding_that_moved_is_seen(monkeypatch):
    def unrounded(beta, v, gamma, ks, dtype):
        return beta * (v - arithmetic.exact_product(gamma, ks))

    assert decode_differs(monkeypatch, "bfloat16", "written_rows", unrounded)


def test_a_chunk_that_is_not_closed_is_seen(monkeypatch):
    assert decode_differs(monkeypatch, "float32", "close", lambda held, closing, state: (state, held.state))


def test_a_state_that_is_not_reset_is_seen():
    rows = sequence(128)
    blocked, chunks = packed([rows, rows])
    joined = Chunks(jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32), chunks.begin, chunks.end, 1)
    assert differing(chunk_form(blocked, joined, no_state())[0][2], chunk_form(blocked, chunks, no_state(2))[0][2])


@jax.jit
def gradients(blocked, chunks, cotangent):
    def of(*rows):
        return gdn.gdn_chunks(*rows, chunks, jnp.zeros((chunks.num_sequences, *no_state().shape[1:]), jnp.float32))[0]

    return jax.vjp(of, *blocked)[1](cotangent)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float32", 3e-6)])
def test_gradients_agree_with_float64_autodiff_of_the_recurrence(dtype, tolerance):
    sequences = [sequence(150, dtype), sequence(64, dtype, 1)]
    layout = {"blocks": 9, "num_sequences": 4}
    outs = [np.random.default_rng(7).standard_normal(rows[2].shape).astype(jnp.dtype(dtype)) for rows in sequences]
    blocked, chunks = packed(sequences, **layout)
    got = gradients(blocked, chunks, packed(outs, **layout)[0])
    for name, values in zip(["q", "k", "v", "g", "beta"], got, strict=True):
        assert np.isfinite(np.asarray(values, np.float32)).all(), name
    with jax.enable_x64(True):
        for i, (rows, out) in enumerate(zip(sequences, outs, strict=True)):
            wide = [jnp.asarray(x, jnp.float64) for x in rows]
            pull = jax.vjp(lambda *rows: gdn.reference.recurrent(*rows)[0], *wide)[1]
            for values, want in zip(got, pull(jnp.asarray(out, jnp.float64)), strict=True):
                error = np.asarray(unpacked(values, chunks)[i], np.float64) - want
                assert np.linalg.norm(error) < tolerance * np.linalg.norm(want)


@dtypes
def test_gradient_bits_do_not_depend_on_batch_mates_or_padding(dtype):
    sequences = [sequence(length, dtype, seed) for seed, length in enumerate((130, 1, 64, 65))]
    outs = [
        np.random.default_rng(9 + len(rows[2])).standard_normal(rows[2].shape).astype(jnp.dtype(dtype))
        for rows in sequences
    ]
    blocked, chunks = packed(sequences, blocks=9)
    together = gradients(blocked, chunks, packed(outs, blocks=9)[0])
    for i, (rows, out) in enumerate(zip(sequences, outs, strict=True)):
        own, own_chunks = packed([rows], blocks=BLOCKS)
        alone = gradients(own, own_chunks, packed([out], blocks=BLOCKS)[0])
        for got, want in zip(together, alone, strict=True):
            assert_bit_equal(unpacked(got, chunks)[i], unpacked(want, own_chunks)[0])


def test_a_gradient_across_cached_rows_is_refused():
    blocked, chunks = packed([sequence(5)])
    held = slots_of(gdn, 1, "float32")
    with pytest.raises(ValueError, match="no gradient across the cached rows"):
        jax.grad(lambda v: gdn.gdn_chunks(*blocked[:2], v, *blocked[3:], chunks, no_state(), held)[0].sum())(blocked[2])


def test_what_no_executor_computes_is_refused():
    q, k, v, g, beta = packed([sequence(5)])[0]
    chunks = packed([sequence(5)])[1]
    with pytest.raises(ValueError, match="one compute dtype, got float32, float32, bfloat16"):
        gdn.gdn_chunks(q, k, v.astype("bfloat16"), g, beta, chunks, no_state())
    with pytest.raises(ValueError, match="2 key heads as many value heads, got 3"):
        gdn.gdn_chunks(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3], chunks, no_state()[:, :3])
    wide = jnp.zeros((*q.shape[:3], 256))
    with pytest.raises(ValueError, match="at most 128 terms, got heads of 256"):
        gdn.gdn_chunks(wide, wide, v, g, beta, chunks, jnp.zeros((1, 4, 256, 32)))
    with pytest.raises(ValueError, match="incremental_chunk in chunks of 64, got recurrent"):
        Numerics("recurrent")


@dtypes
def test_the_native_twin_carries_its_state_through_pieces_and_tokens(dtype):
    rows = sequence(200, dtype)
    want, _ = oracle(rows)
    tolerance = 8e-3 if dtype == "bfloat16" else 2e-6
    pieces, state, opened = in_pieces(rows, [20, 64, 100, 129], op=stock)
    tokens, _, slots = token_by_token([rows], op=stock)
    for o in (pieces, tokens[0]):
        assert np.linalg.norm(o.astype(np.float64) - want) < tolerance * np.linalg.norm(want)
    closed = oracle(prefix(rows, 192))[1]
    assert np.linalg.norm(state[0] - closed) < 2e-6 * np.linalg.norm(closed)
    np.testing.assert_allclose(opened.state, slots.state, atol=1e-5)


def test_the_native_twin_is_two_algorithms():
    rows = sequence(70)
    assert differing(in_pieces(rows, [], op=stock)[0], token_by_token([rows], op=stock)[0][0])


def test_the_native_twin_has_the_gradient_of_the_recurrence():
    rows = sequence(130)
    blocked, chunks = packed([rows], blocks=BLOCKS, padding=0)
    cotangent = np.random.default_rng(1).standard_normal(blocked[2].shape).astype(np.float32)
    cotangent[2, 2:] = 0
    pull = jax.jit(lambda b, c: jax.vjp(lambda *rows: stock.gdn_chunks(*rows, chunks, no_state())[0], *b)[1](c))
    for a, b in zip(
        pull(blocked, jnp.asarray(cotangent)), gradients(blocked, chunks, jnp.asarray(cotangent)), strict=True
    ):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)
