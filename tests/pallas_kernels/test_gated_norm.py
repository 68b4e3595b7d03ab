import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from isojax.layouts import Segments
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.spread import head_sum, share_over_heads
from tests.bits import assert_bit_equal, bits, differing


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


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_their_own_heads_compute_subtrees_of_the_head_sum(ranks):
    grad = heads_of(32, 1, 64)[:, 0]
    own = 32 // ranks
    parts = [jax.jit(head_sum, static_argnums=1)(grad[r * own :][:own], 8 // ranks) for r in range(ranks)]
    assert_bit_equal(jax.jit(lambda *p: trees.fold(jnp.add, p))(*parts), jax.jit(head_sum)(grad))


def test_the_number_of_head_splits_decides_bits():
    grad = heads_of(16, 1, 32)[:, 0]
    assert differing(head_sum(grad, 1), head_sum(grad))


@pytest.mark.parametrize("heads", [1, 6, 16])
def test_a_shared_weight_adds_its_heads_as_written(heads):
    scale, grad = jnp.arange(16.0), heads_of(heads, 1, 16)[:, 0]
    out, pull = jax.vjp(jax.jit(lambda s: share_over_heads(s, heads)), scale)
    assert (bits(out) == bits(scale)).all()
    assert_bit_equal(pull(grad)[0], head_sum(grad))
