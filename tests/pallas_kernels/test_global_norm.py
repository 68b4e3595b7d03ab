import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from isojax import trees
from pallas_kernels.global_norm import (
    Numerics,
    global_norm,
    kernel,
    norm_of_tiles,
    reference,
    stock,
    tile_of,
    tile_sums,
)
from tests.bits import assert_bit_equal, differing


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def tree():
    return {
        "embed": random(0, 512, 128),
        "layers": {
            "0": {"norm": random(1, 2, 128), "experts": random(2, 2, 4, 64, 32)},
            "1": {"conv": random(3, 96, 4)},
        },
        "bias": random(4, 40),
        "scale": random(5),
    }


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((248_320, 2048), (64, 64)),
        ((4, 768, 2048), (32, 64)),
        ((512, 128), (64, 16)),
        ((96, 4), (4, 1)),
        ((40,), (1, 1)),
        ((7, 48), (1, 2)),
        ((), (1, 1)),
    ],
)
def test_a_tile_divides_every_shard(shape, tile):
    assert tile_of(shape) == tile
    for size, side in zip((1, 1, *shape)[-2:], tile, strict=True):
        for ranks in (1, 2, 4, 8):
            assert size % ranks or (size // ranks) % side == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_have_the_bits_of_the_reference_in_every_schedule(dtype):
    x = random(0, 192, 96, dtype=dtype)
    want = reference.tile_sums(x, (32, 16))
    for elements in (1, 96 * 64, 1 << 20):
        schedule = kernel.Schedule(elements)
        assert_bit_equal(jax.jit(lambda x, s=schedule: kernel.tile_sums(x, (32, 16), s))(x), want)


def test_tiles_meet_in_tree_order_and_tensors_by_name():
    tiles = {"b": random(0, 5, 3), "a": random(1, 15), "a.c": random(2, 7, 1)}
    tiles = jax.tree.map(jnp.abs, tiles)
    got = jax.jit(norm_of_tiles)(tiles)
    assert_bit_equal(got, reference.norm_of_tiles(tiles))
    sums = {name: trees.fold(np.add, list(np.asarray(x).reshape(-1))) for name, x in tiles.items()}
    assert_bit_equal(got, np.sqrt((sums["a"] + sums["a.c"]) + sums["b"]))


def test_it_is_the_norm():
    grads = tree()
    want = np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(grads)))
    np.testing.assert_allclose(global_norm(grads), want, rtol=3e-7)
    np.testing.assert_allclose(stock.global_norm(grads), want, rtol=1e-5)


def test_tensors_that_share_a_region_have_the_tiles_of_each_alone():
    grads = {"a": random(0, 2, 64, 96), "b": random(1, 128, 96), "c": random(2, 96), "d": random(3, 8, 64, 96)}
    alone = {name: tile_sums(x) for name, x in grads.items()}
    assert_bit_equal(global_norm(grads), norm_of_tiles(alone))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shards_gather_to_the_bits_of_the_whole(ranks):
    x = random(0, 3, 64, 128)
    whole = tile_sums(x)
    for axis in (1, 2):
        run = jax.jit(lambda shard: tile_sums(shard, global_shape=x.shape))
        shards = [run(shard) for shard in jnp.split(x, ranks, axis)]
        assert_bit_equal(jnp.concatenate(shards, axis), whole)


def test_the_order_in_which_a_tree_was_built_does_not_matter():
    grads = tree()
    backwards = {name: grads[name] for name in reversed(grads)}
    assert_bit_equal(jax.jit(global_norm)(backwards), jax.jit(global_norm)(grads))


def test_a_module_and_its_plain_dict_have_one_norm():
    module = nnx.Linear(24, 40, rngs=nnx.Rngs(0))
    module.bias[...] = random(1, 40)
    state = nnx.state(module, nnx.Param)
    assert_bit_equal(jax.jit(global_norm)(state), jax.jit(global_norm)(nnx.to_pure_dict(state)))


def test_another_tile_or_order_is_another_sum():
    # Several tensors of wide range, because the roots of two sums often agree by chance.
    tensors = [jnp.exp(3 * random(seed, 128, 96)) for seed in range(8)]

    def norms(numerics, flip):
        run = jax.jit(lambda x: global_norm({"x": x[::-1] if flip else x}, numerics=numerics))
        return jnp.stack([run(x) for x in tensors])

    want = norms(Numerics(), False)
    assert differing(norms(Numerics(max_tile=8), False), want)
    assert differing(norms(Numerics(), True), want)
    assert_bit_equal(norms(Numerics(), False), want)


def test_the_bad_gradient_shows():
    grads = tree()
    grads["layers"]["1"]["conv"] = grads["layers"]["1"]["conv"].at[3, 2].set(jnp.nan)
    assert np.isnan(jax.jit(global_norm)(grads))


def test_cut_tiles_and_empty_trees_are_refused():
    with pytest.raises(ValueError, match="divides num_splits=8"):
        tile_sums(random(0, 64, 24), global_shape=(64, 384))
    with pytest.raises(ValueError, match="no leaves"):
        global_norm({})
