"""What every row-wise op promises, for those that have no test file of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from isojax.layouts import Segments
from pallas_kernels import rows as rows_module
from pallas_kernels.fork import fork, split
from pallas_kernels.norm_rope import norm_rope, rotary_tables
from pallas_kernels.output_gate import output_gate
from pallas_kernels.residual_add import residual_add
from pallas_kernels.rms_norm import rms_norm


def bits(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def same(a, b):
    np.testing.assert_array_equal(bits(a), bits(b))


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


TABLES = rotary_tables(256, 16, 1e7)


def _rope(x, y):
    cos, sin = (jnp.asarray(t)[: x.shape[0]] for t in TABLES)
    return norm_rope(x.reshape(-1, 4, 32), y[0, :32].astype(jnp.float32), cos, sin).reshape(x.shape)


OPS = {
    "rms_norm": lambda x, y: rms_norm(x, y[0].astype(jnp.float32)),
    "residual_add": residual_add,
    "output_gate": output_gate,
    "norm_rope": _rope,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", OPS)
def test_a_row_keeps_its_bits_in_any_company_and_program(name, dtype):
    x, y = random(0, 256, 128, dtype=dtype), random(1, 256, 128, dtype=dtype)
    op = OPS[name]
    want = jax.jit(op)(x, y)
    for rows in (1, 7, 33, 64, 65, 255):
        same(jax.jit(op)(x[:rows], y[:rows]), want[:rows])
    inside = jax.jit(lambda x, y: (op(x, y) * 2 + x, op(x, y)))(x, y)[1]
    same(inside, want)


def test_b002_a_row_in_launches_of_1_255_256_and_257_rows():
    x, scale = random(0, 257, 96), random(1, 96)
    want = jax.jit(rms_norm)(x, scale)[:1]
    for rows in (1, 255, 256, 257):
        same(jax.jit(rms_norm)(x[:rows], scale)[:1], want)


def test_b002_a_row_block_that_follows_the_launch_goes_red(monkeypatch):
    x, scale = random(0, 64, 128), random(1, 128)
    want = jax.jit(rms_norm)(x, scale)
    monkeypatch.setattr(rows_module, "_BLOCK", 8)
    assert (bits(jax.jit(lambda x: rms_norm(x, scale))(x[:8])) != bits(want)[:8]).any()


def test_b022_a_zero_centred_scale_of_2_to_the_minus_9_shows():
    x = jnp.ones((64, 32), jnp.bfloat16)
    scale = jnp.full(32, 2.0**-9)
    product = jax.jit(rms_norm)(x.astype(jnp.float32), scale)
    assert np.abs(np.asarray(product) - (1 + 2.0**-9)).max() < 1e-6  # 1 + 2^-9 formed in bfloat16 is 1.


def test_b022_the_effect_reaches_bfloat16_rows():
    x, scale = random(0, 64, 128, dtype="bfloat16"), jnp.full(128, 2.0**-9)
    got, plain = (np.asarray(jax.jit(rms_norm)(x, s), np.float64) for s in (scale, jnp.zeros(128)))
    # 2^-9 is a quarter to a half of what bfloat16 tells apart: it moves so many of the elements, each up by one.
    assert 0.2 < (got != plain).mean() < 0.55
    assert (np.abs(got) >= np.abs(plain)).all()
    formed_in_bfloat16 = jax.jit(rms_norm)(x, (1 + scale.astype(jnp.bfloat16)).astype(jnp.float32) - 1)
    same(formed_in_bfloat16, jax.jit(rms_norm)(x, jnp.zeros(128)))  # As which the effect would be gone.


def test_gradients_of_a_packed_batch_fold_the_gradients_of_its_sequences():
    x, scale, g = random(0, 6 * 64, 96), random(1, 96), random(2, 6 * 64, 96)
    sequence = np.array([0, 1, 1, 2, 3, 3])

    @jax.jit
    def grads(x, g, segments):
        return jax.vjp(lambda x, s: rms_norm(x, s, segments=segments), x, scale)[1](g)

    dx, dscale = grads(x, g, Segments(jnp.asarray(sequence), 4))
    alone = []
    for index in range(4):
        rows = np.repeat(sequence == index, 64)
        alone_dx, alone_dscale = grads(x[rows], g[rows], Segments.one(int(rows.sum())))
        same(dx[rows], alone_dx)
        alone.append(alone_dscale)
    same(dscale, jax.jit(lambda *t: trees.fold(jnp.add, t))(*alone))
    assert (bits(dscale) != bits(jax.jit(lambda *t: trees.chain(jnp.add, t))(*alone))).any()


def test_the_rotation_agrees_with_float64():
    x, scale = np.asarray(random(0, 100, 128)).reshape(100, 4, 32), np.asarray(random(1, 32))
    got = _rope(jnp.asarray(x.reshape(100, 128)), jnp.tile(scale, (100, 4)))
    wide = x.astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)
    angle = np.arange(100)[:, None] * 1e7 ** (-np.arange(0, 16, 2) / 16)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b, rest = wide[..., :8], wide[..., 8:16], wide[..., 16:]
    want = np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
    assert np.abs(np.asarray(got, np.float64).reshape(want.shape) - want).max() < 1e-5


@pytest.mark.parametrize("width", [16, 32])
def test_a_head_keeps_its_bits_whatever_the_number_of_local_heads(width):
    x, scale = random(0, 70, 16, width), random(1, width)
    cos, sin = (jnp.asarray(t)[:70, : width // 4] for t in TABLES)
    run = jax.jit(lambda x: norm_rope(x, scale, cos, sin))
    want = run(x)
    for heads in (1, 2, 8):
        same(run(x[:, :heads]), want[:, :heads])


def test_b025_tables_are_float32_made_from_float64():
    cos, sin = TABLES
    assert cos.dtype == sin.dtype == np.float32
    assert cos[200, 3] == np.float32(np.cos(200 * 1e7 ** (-6 / 16)))
    with pytest.raises(ValueError, match="float32 tables"):
        norm_rope(random(0, 4, 2, 32), random(1, 32), *(jnp.asarray(t[:4], jnp.bfloat16) for t in TABLES))


def test_cotangents_of_a_fork_are_added_in_consumer_order():
    x = random(0, 64, 32)
    factors = [random(i, 64, 32) for i in range(1, 4)]

    def loss(x, order):
        copies = fork(x, 3)
        return sum((copies[i] * factors[i]).sum() for i in order)

    forwards, backwards = (jax.jit(jax.grad(lambda x, o=o: loss(x, o)))(x) for o in ((0, 1, 2), (2, 1, 0)))
    same(forwards, backwards)
    want = (np.asarray(factors[0]) + np.asarray(factors[1])) + np.asarray(factors[2])
    same(forwards, want)


def test_a_split_joins_the_cotangents_of_its_pieces():
    x = random(0, 8, 10)
    pieces, pull = jax.vjp(lambda x: split(x, (3, 7), -1), x)
    same(jnp.concatenate(pieces, -1), x)
    same(pull(pieces)[0], x)
