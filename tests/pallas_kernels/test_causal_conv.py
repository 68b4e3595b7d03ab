import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.layouts import Segments
from pallas_kernels.causal_conv import causal_conv_chunks, causal_conv_decode, kernel, reference
from tests.bits import assert_bit_equal, bits, differing
from tests.pallas_kernels.pieces import packed, pieces_of, unpacked

CHANNELS = 24
WEIGHT = jnp.asarray(np.random.default_rng(9).standard_normal((CHANNELS, 4)), jnp.float32)
chunks_form = jax.jit(causal_conv_chunks)
decode_form = jax.jit(causal_conv_decode)


def tokens(length, dtype="float32", seed=0):
    return np.random.default_rng(seed + 100 * length).standard_normal((length, CHANNELS)).astype(jnp.dtype(dtype))


def whole(sequences, **layout):
    """Rows of every sequence, and their windows, from one call; absent rows are NaN."""
    x, chunks = packed(sequences, **layout)
    y, window = chunks_form(x, None, WEIGHT, chunks)
    return unpacked(y, chunks), window


def in_pieces(x, cuts):
    rows, window = [], jnp.zeros((1, 3, CHANNELS), x.dtype)
    for begin, end in pieces_of(len(x), cuts):
        piece, chunks = packed([x[begin:end]], starts=[begin], blocks=3)
        y, window = chunks_form(piece, window, WEIGHT, chunks)
        rows += unpacked(y, chunks)
    return np.concatenate(rows), window


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_whole_pieces_and_single_rows_have_the_same_bits(dtype):
    x = tokens(150, dtype)
    (want,), window = whole([x], blocks=3)
    for cuts in ([63], [64], [65], [1, 2, 3], [20, 64, 66, 129]):
        assert_bit_equal(in_pieces(x, cuts), (want, window))
    one = jnp.zeros((1, 3, CHANNELS), x.dtype)
    for t in range(70):
        y, one = decode_form(x[t : t + 1], one, WEIGHT)
        assert_bit_equal(y[0], want[t])
    assert_bit_equal(one, in_pieces(x[:70], [])[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sequences_do_not_see_each_other_nor_padding(dtype):
    """B067: pad tokens drive neither the convolution nor its window."""
    lengths = [1, 2, 64, 130, 3]
    sequences = [tokens(n, dtype) for n in lengths]
    together, windows = whole(sequences, blocks=9)
    for i, x in enumerate(sequences):
        (alone,), window = whole([x], blocks=3)
        assert_bit_equal((together[i], windows[i]), (alone, window[0]))
        assert np.isfinite(np.asarray(alone, np.float32)).all()


def test_rows_that_are_absent_come_out_zero_and_unseen_sequences_keep_their_window():
    x, chunks = packed([tokens(5)], starts=[60], num_sequences=2)
    window = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, CHANNELS)), jnp.float32)
    y, after = chunks_form(x, window, WEIGHT, chunks)
    assert not np.asarray(y[0, :60]).any()
    assert not np.asarray(y[1, 1:]).any()
    assert_bit_equal(after[1], window[1])


def test_a_new_sequence_ignores_what_its_window_held():
    x, chunks = packed([tokens(70)])
    stale = jnp.full((1, 3, CHANNELS), jnp.nan)
    assert_bit_equal(chunks_form(x, stale, WEIGHT, chunks), chunks_form(x, None, WEIGHT, chunks))


def test_a_value_is_the_chain_of_rounded_products():
    x = np.asarray(tokens(70))
    (got,), _ = whole([x])
    padded = np.concatenate([np.zeros((3, CHANNELS), np.float32), x])
    total = padded[:70] * np.asarray(WEIGHT[:, 0])
    for j in range(1, 4):
        total = total + padded[j : j + 70] * np.asarray(WEIGHT[:, j])
    assert_bit_equal(got, jax.jit(jax.nn.silu)(total))


def test_contracted_products_would_not_keep_the_bits():
    extended = jnp.concatenate([jnp.zeros((3, CHANNELS)), tokens(64)])[None]
    assert differing(jax.jit(reference.causal_conv)(extended, WEIGHT), jax.jit(kernel.forward)(extended, WEIGHT.T))


@functools.partial(jax.jit, static_argnames="op")
def gradients(x, chunks, cotangent, segments=None, op=causal_conv_chunks):
    y, pull = jax.vjp(lambda x, w: op(x, None, w, chunks, segments=segments)[0], x, WEIGHT)
    return pull(cotangent.astype(y.dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float32", 1e-6)])
def test_gradients_agree_with_float64(dtype, tolerance):
    x, chunks = packed([tokens(130, dtype), tokens(40, dtype)], padding=0)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), dtype)
    got = gradients(x, chunks, cotangent)
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64)
        rows = np.asarray(unpacked_mask(chunks))

        def definition(x, w):
            def sequence(blocks):
                flat = jnp.pad(blocks.reshape(-1, CHANNELS), ((3, 0), (0, 0)))
                total = sum(flat[j : j + len(flat) - 3] * w[:, j] for j in range(4))
                return (total * jax.nn.sigmoid(total)).reshape(blocks.shape)

            return jnp.concatenate([sequence(x[:3]), sequence(x[3:])])

        pull = jax.vjp(definition, wide, WEIGHT.astype(jnp.float64))[1]
        want = pull(jnp.where(rows, cotangent.astype(jnp.float64), 0))
    want = np.where(rows, want[0], 0), want[1]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=tolerance * np.abs(b).max())


def unpacked_mask(chunks):
    row = np.arange(64)[None, :, None]
    return (row >= np.asarray(chunks.begin)[:, None, None]) & (row < np.asarray(chunks.end)[:, None, None])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_do_not_depend_on_batch_mates_or_padding(dtype):
    sequences = [tokens(n, dtype) for n in (130, 64, 70)]
    cotangents = [tokens(n, dtype, 1) for n in (130, 64, 70)]
    x, chunks = packed(sequences, blocks=7)
    whole_x, whole_w = gradients(x, chunks, packed(cotangents, blocks=7)[0])
    alone = [
        gradients(*packed([x], blocks=3), packed([c], blocks=3)[0]) for x, c in zip(sequences, cotangents, strict=True)
    ]
    for got, (want, _) in zip(unpacked(whole_x, chunks), alone, strict=True):
        assert_bit_equal(got, np.concatenate(want)[: len(got)])
    fold = jax.jit(lambda a, b, c: (a + b) + c)
    assert_bit_equal(whole_w, fold(*(w for _, w in alone)))
    one = Segments(jnp.zeros(len(x), jnp.int32), 1)
    assert differing(whole_w, gradients(x, chunks, packed(cotangents, blocks=7)[0], one)[1])


def test_a_row_gradient_across_a_block_border_is_one_sum():
    x, chunks = packed([tokens(128)])
    cotangent = packed([tokens(128, seed=1)])[0]
    got = gradients(x, chunks, cotangent)[0]
    by_autodiff = gradients(x, chunks, cotangent, op=reference.causal_conv_chunks)[0]
    np.testing.assert_allclose(got, by_autodiff, atol=1e-5)
    shifted, moved = packed([tokens(128)[3:]]), packed([tokens(128, seed=1)[3:]])[0]  # Other rows lie on the border.
    inner = slice(10, 128)
    a = np.concatenate(got)[inner]
    b = np.concatenate(gradients(*shifted, moved)[0])[7:125]
    assert (bits(a) == bits(b)).all()


def test_a_window_of_another_dtype_is_refused():
    x, chunks = packed([tokens(5, "bfloat16")])
    with pytest.raises(ValueError, match="bfloat16 window, got float32"):
        causal_conv_chunks(x, jnp.zeros((1, 3, CHANNELS)), WEIGHT, chunks)
