import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from isojax.layouts import Segments
from pallas_kernels.linear import Numerics, Schedule, column_linear, row_linear, stock


def bits(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def same(a, b):
    np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layer", ["column", "row"])
def test_a_row_keeps_its_bits_in_any_company_and_tile(layer, dtype):
    x, w = random(0, 130, 160, dtype=dtype), random(1, 72, 160)

    def run(x, schedule=Schedule()):
        if layer == "row":
            return jax.jit(lambda x: row_linear(x, w, schedule=schedule))(x)
        return jax.jit(lambda x: column_linear(x, (w,), schedule=schedule)[0])(x)

    want = run(x)
    for rows in (1, 7, 33):
        same(run(x[:rows]), want[:rows])
    same(run(x[::-1])[::-1], want)
    for schedule in (Schedule(8), Schedule(64, 16), Schedule(64, 64)):
        same(run(x, schedule), want)


def test_stock_dots_do_not_keep_them():
    x, w = random(0, 130, 320), random(1, 72, 320)
    run = jax.jit(lambda x: stock.row_linear(x, w))
    assert (bits(run(x[:1])) != bits(run(x)[:1])).any()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shards_of_a_row_parallel_layer_hold_subtrees(ranks):
    x, w = random(0, 40, 256), random(1, 48, 256)
    shard = jax.jit(lambda x, w: row_linear(x, w, numerics=Numerics(num_splits=8 // ranks)))
    width = 256 // ranks
    partial = [shard(x[:, i * width :][:, :width], w[:, i * width :][:, :width]) for i in range(ranks)]
    same(jax.jit(lambda *p: trees.fold(jnp.add, p))(*partial), jax.jit(row_linear)(x, w))


def test_the_number_of_splits_decides_bits():
    x, w = random(0, 40, 256), random(1, 48, 256)
    one, eight = (jax.jit(lambda x, n=n: row_linear(x, w, numerics=Numerics(num_splits=n)))(x) for n in (1, 8))
    assert (bits(one) != bits(eight)).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_and_gradients_agree_with_float64(dtype):
    x, ws = random(0, 128, 96, dtype=dtype), (random(1, 40, 96), random(2, 4, 96))
    w_row = random(3, 24, 96)

    def loss(linear_column, linear_row):
        def of(x, ws, w_row):
            a, b = linear_column(x, ws, out_dtypes=(None, jnp.float32))
            return (jnp.sin(a.astype(jnp.float32)).sum() + jnp.cos(b).sum()
                    + jnp.sin(linear_row(x, w_row).astype(jnp.float32)).sum())  # fmt: skip

        return jax.jit(jax.grad(of, argnums=(0, 1, 2)))

    got = loss(column_linear, row_linear)(x, ws, w_row)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a.astype(dtype), np.float64)), (x, ws, w_row))

        def of64(x, ws, w_row):
            return jnp.sin(x @ ws[0].T).sum() + jnp.cos(x @ ws[1].T).sum() + jnp.sin(x @ w_row.T).sum()

        want = jax.jit(jax.grad(of64, argnums=(0, 1, 2)))(*wide)
    tolerance = 2e-4 if dtype == "float32" else 0.15
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = np.abs(b).max()
        assert np.abs(np.asarray(a, np.float64) - b).max() < tolerance * scale


def test_gradients_of_a_packed_batch_fold_the_gradients_of_its_sequences():
    x, g, w = random(0, 6 * 64, 96), random(1, 6 * 64, 40), random(2, 40, 96)
    sequence = np.array([0, 1, 1, 2, 3, 3])  # Sequence 4 is absent.

    @jax.jit
    def weight_grad(x, g, segments):
        _, pull = jax.vjp(lambda w: column_linear(x, (w,), segments=segments)[0], w)
        return pull(g)[0]

    whole = weight_grad(x, g, Segments(jnp.asarray(sequence), 5))
    alone = []
    for index in range(5):
        rows = np.repeat(sequence == index, 64)
        alone.append(weight_grad(x[rows], g[rows], Segments.one(int(rows.sum()))) if rows.any() else jnp.zeros_like(w))
    same(whole, jax.jit(lambda *t: trees.fold(jnp.add, t))(*alone))
    chained = jax.jit(lambda *t: trees.chain(jnp.add, t))(*alone)
    assert (bits(whole) != bits(chained)).any()


def test_projections_together_have_the_values_and_weight_gradients_of_each_alone():
    x, weights = random(0, 70, 160, dtype="bfloat16"), tuple(random(i, n, 160) for i, n in enumerate((24, 4, 100)))
    cotangents = random(5, 70, 24, dtype="bfloat16"), random(6, 70, 4), random(7, 70, 100, dtype="bfloat16")

    @jax.jit
    def run(weights, cotangents):
        dtypes = [g.dtype for g in cotangents]
        out, pull = jax.vjp(lambda *weights: column_linear(x, weights, out_dtypes=dtypes), *weights)
        return out, pull(cotangents)

    values, gradients = run(weights, cotangents)
    for i in range(3):
        (value,), (gradient,) = run(weights[i : i + 1], cotangents[i : i + 1])
        assert value.dtype == cotangents[i].dtype
        same(values[i], value)
        same(gradients[i], gradient)


def test_the_input_gradient_of_several_projections_is_one_ordered_sum():
    x, ws = random(0, 70, 64), (random(1, 32, 64), random(2, 48, 64), random(5, 8, 64))
    gs = (random(3, 70, 32), random(4, 70, 48), random(6, 70, 8))
    _, pull = jax.vjp(jax.jit(lambda x: column_linear(x, ws)), x)
    (got,) = pull(gs)
    _, pull = jax.vjp(jax.jit(lambda x: column_linear(x, ws[::-1])), x)
    (reversed_order,) = pull(gs[::-1])
    assert (bits(got) != bits(reversed_order)).any()
    want = sum(np.asarray(g, np.float64) @ np.asarray(w, np.float64) for g, w in zip(gs, ws, strict=True))
    assert np.abs(got - want).max() < 1e-4


def test_splits_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_splits=8"):
        row_linear(random(0, 8, 100), random(1, 72, 100))
