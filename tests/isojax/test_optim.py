import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from isojax import optim
from pallas_kernels.global_norm import norm_of_tiles, tile_sums
from tests.bits import assert_bit_equal, differing


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def params():
    return {"embed": random(0, 64, 32), "layers": {"0": {"norm": random(1, 2, 32), "proj": random(2, 2, 16, 32)}}}


def gradients(step):
    return jax.tree.map(lambda x: 0.3 * random(100 + step, *x.shape), params())


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 8)
OPTIMIZERS = {
    "plain": optim.AdamW(1e-2),
    "clipped": optim.AdamW(1e-2, b2=0.95, weight_decay=0.1, max_grad_norm=1.0),
    "scheduled": optim.AdamW(SCHEDULE, max_grad_norm=1.0),
}
OPTAX = {
    "plain": optax.adamw(1e-2, weight_decay=0.0),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95, weight_decay=0.1)),
    "scheduled": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, weight_decay=0.0)),
}


def train(optimizer, steps, start=None):
    update = jax.jit(optimizer.update)
    tree, state = (params(), optimizer.init(params())) if start is None else start
    for step in range(int(state.count), steps):
        tree, state = update(tree, gradients(step), state)
    return tree, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_optax_adamw_within_rounding(name):
    got, state = train(OPTIMIZERS[name], 5)
    tx, want = OPTAX[name], params()
    theirs = tx.init(want)
    for step in range(5):
        updates, theirs = tx.update(gradients(step), theirs, want)
        want = optax.apply_updates(want, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)
    assert int(state.count) == 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(name):
    whole = train(OPTIMIZERS[name], 5)
    stopped = jax.tree.map(np.asarray, train(OPTIMIZERS[name], 2))  # As a checkpoint keeps it.
    assert_bit_equal(train(OPTIMIZERS[name], 5, jax.tree.map(jnp.asarray, stopped)), whole)


def test_the_optax_form_inside_flax_gives_the_same_bits():
    class Model(nnx.Module):
        def __init__(self):
            self.embed, self.norm = nnx.Param(params()["embed"]), nnx.Param(random(1, 32))

    model = Model()
    tree = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, optim.adamw(1e-2, weight_decay=0.1, max_grad_norm=1.0), wrt=nnx.Param)
    ours = optim.AdamW(1e-2, weight_decay=0.1, max_grad_norm=1.0)
    state = ours.init(tree)
    step = nnx.jit(lambda model, optimizer, grads, norm: optimizer.update(model, grads, grad_norm=norm))
    for seed in range(3):
        grads = nnx.state(model, nnx.Param)
        grads = jax.tree.map(lambda x, s=seed: random(s + 50, *x.shape), grads)
        tree, state = jax.jit(ours.update)(tree, nnx.to_pure_dict(grads), state)
        if seed == 1:
            step(model, optimizer, grads, jax.jit(optim.global_norm)(grads))
        else:
            optimizer.update(model, grads)
    assert_bit_equal(nnx.to_pure_dict(nnx.state(model, nnx.Param)), tree)
    assert_bit_equal(jax.tree.leaves(nnx.as_pure(optimizer.opt_state)), jax.tree.leaves(state))


def test_a_tensor_has_the_same_bits_alone_and_among_others():
    optimizer, tree = optim.AdamW(1e-2, weight_decay=0.1), {"a": random(0, 64, 32), "b": random(1, 7)}
    tree["large"] = random(2, 1 << 20)  # Joined with no other.
    grads = jax.tree.map(lambda x: x[::-1], tree)
    together, _ = optimizer.update(tree, grads, optimizer.init(tree))
    for name, tensor in tree.items():
        alone, _ = optimizer.update({name: tensor}, {name: grads[name]}, optimizer.init({name: tensor}))
        assert_bit_equal(together[name], alone[name])


@pytest.mark.parametrize("ranks", [2, 8])
def test_shards_are_updated_to_the_bits_of_the_whole(ranks):
    optimizer = OPTIMIZERS["clipped"]
    want = train(optimizer, 2)
    specs = {"embed": P("tensor", None), "layers": {"0": {"norm": P(), "proj": P(None, None, "tensor")}}}
    mesh = jax.make_mesh((ranks,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    shapes = jax.tree.map(jnp.shape, params(), is_leaf=lambda x: hasattr(x, "shape"))

    def whole_tiles(shard, shape, spec):
        tiles = tile_sums(shard, global_shape=shape)
        axis = next((i for i, name in enumerate(spec) if name), None)
        return tiles if axis is None else jax.lax.all_gather(tiles, "tensor", axis=axis, tiled=True)

    def update(tree, grads, state):
        named = [grads["embed"], grads["layers"]["0"]["norm"], grads["layers"]["0"]["proj"]]
        where = [(shapes["embed"], specs["embed"])]
        where += [(shapes["layers"]["0"][n], specs["layers"]["0"][n]) for n in ("norm", "proj")]
        names = ("embed", "layers.0.norm", "layers.0.proj")
        norm = norm_of_tiles({n: whole_tiles(g, *w) for n, g, w in zip(names, named, where, strict=True)})
        return optimizer.update(tree, grads, state, grad_norm=norm)

    state_specs = optim.AdamWState(P(), specs, specs)
    sharded = jax.jit(
        jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(specs, specs, state_specs),
            out_specs=(specs, state_specs),
            check_vma=False,
        )
    )
    tree, state = params(), optimizer.init(params())
    for step in range(2):
        tree, state = sharded(tree, gradients(step), state)
    assert_bit_equal((tree, state), want)


def test_optax_does_not_keep_its_bits_in_another_program():
    tree, grads = params(), gradients(0)
    tx = OPTAX["clipped"]

    def update(tree, grads):
        updates, _ = tx.update(grads, tx.init(tree), tree)
        return optax.apply_updates(tree, updates)

    assert differing(update(tree, grads)["embed"], jax.jit(update)(tree, grads)["embed"])
    ours = OPTIMIZERS["clipped"]
    one, other = (f(tree, grads, ours.init(tree))[0] for f in (ours.update, jax.jit(ours.update)))
    assert_bit_equal(one, other)


def test_rounded_parameters_and_missing_ones_are_refused():
    with pytest.raises(ValueError, match=r"got bfloat16 for \['embed'\]"):
        optim.adamw(1e-3).init({"embed": jnp.ones(3, jnp.bfloat16)})
    tx = optim.adamw(1e-3)
    state = tx.init(params())
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params(), state)
