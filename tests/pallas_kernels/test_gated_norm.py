import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from isojax.layouts import Segments
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.rows import head_sum
from tests.bits import assert_bit_equal, differing


def heads_of(rows, heads, width, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, heads, width)), dtype)


def inputs(rows, heads, width, dtype="float32"):
    o, z, cotangent = (heads_of(rows, heads, width, dtype, seed) for seed in range(3))
    return o, z, jnp.asarray(np.random.default_rng(3).standard_normal(width), jnp.float32), cotangent


@jax.jit
def with_gradients(o, z, scale, cotangent, segments):
    out, pull = jax.vjp(lambda *args: gated_norm(*args, segments=segments), o, z, scale)
    return out, *pull(cotangent)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_head_and_a_row_keep_their_bits_in_any_company(dtype):
    o, z, scale, cotangent = inputs(128, 8, 32, dtype)
    want = with_gradients(o, z, scale, cotangent, Segments.one(128))[:3]
    for rows, heads in ((128, 1), (7, 3)):
        p = np.s_[:rows, :heads]
        got = with_gradients(o[p], z[p], scale, cotangent[p], Segments.one(rows))[:3]
        assert_bit_equal(got, tuple(w[p] for w in want))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float32", 3e-6)])
def test_values_and_gradients_agree_with_float64(dtype, tolerance):
    o, z, scale, cotangent = inputs(200, 3, 32, dtype)
    got = with_gradients(o, z, scale, cotangent, Segments(jnp.asarray([0, 0, 1, 1]), 2))
    with jax.enable_x64(True):

        def definition(o, z, scale):
            return o / jnp.sqrt(jnp.mean(o * o, axis=-1, keepdims=True) + 1e-6) * scale * z * jax.nn.sigmoid(z)

        out, pull = jax.vjp(definition, *(x.astype(jnp.float64) for x in (o, z, scale)))
        want = out, *pull(cotangent.astype(jnp.float64))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=tolerance * np.abs(b).max())


def test_a_bfloat16_result_is_the_float32_one_rounded_once():
    o, z, scale, _ = inputs(64, 2, 32, "bfloat16")
    wide = jax.jit(gated_norm)(o.astype(jnp.float32), z.astype(jnp.float32), scale)
    assert_bit_equal(jax.jit(gated_norm)(o, z, scale), np.asarray(wide).astype(jnp.bfloat16))


def test_sequences_apart_and_together_have_one_scale_gradient():
    o, z, scale, cotangent = inputs(192, 16, 32)
    whole = with_gradients(o, z, scale, cotangent, Segments(jnp.asarray([0, 0, 1]), 2))[3]
    parts = [
        with_gradients(o[rows], z[rows], scale, cotangent[rows], Segments.one(rows.stop - rows.start))[3]
        for rows in (slice(0, 128), slice(128, 192))
    ]
    assert_bit_equal(jax.jit(jnp.add)(*parts), whole)


def test_heads_are_added_in_a_chain_inside_splits_and_a_tree_over_them():
    partials = heads_of(3, 24, 32)
    splits = [trees.chain(jnp.add, [partials[:, 3 * s + h] for h in range(3)]) for s in range(8)]
    want = trees.fold(jnp.add, splits)
    assert_bit_equal(head_sum(partials), want)
    assert differing(trees.chain(jnp.add, [partials[:, h] for h in range(24)]), want)


def test_the_scale_gradient_adds_rows_of_a_block_then_heads_then_blocks():
    o, z, scale, cotangent = inputs(128, 6, 32)
    alone = [
        [
            with_gradients(o[b, h], z[b, h], scale, cotangent[b, h], Segments.one(64))[3]
            for h in np.s_[0:1, 1:2, 2:3, 3:4, 4:5, 5:6]
        ]
        for b in (slice(0, 64), slice(64, 128))
    ]
    first, second = (head_sum(jnp.stack(heads)[None])[0] for heads in alone)
    assert_bit_equal(with_gradients(o, z, scale, cotangent, Segments.one(128))[3], first + second)
