"""Fingerprints: of values here, of programs below."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.bits import digest


def tree():
    return {"norm": jnp.ones(3), "layers": {"0": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "1": jnp.int32(4)}}


def test_a_digest_does_not_depend_on_the_order_or_kind_of_containers():
    other = {"layers": [tree()["layers"]["0"], np.int32(4)], "norm": np.ones(3, np.float32)}
    assert digest(tree()) == digest(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"norm": t["norm"].at[1].set(1.0000001)},
        lambda t: t | {"norm": t["norm"].astype(jnp.bfloat16)},
        lambda t: t | {"norm": t["norm"][None]},
        lambda t: t | {"scale": t.pop("norm")},
        lambda t: t | {"more": jnp.zeros(0)},
        lambda t: t | {"norm": -t["norm"] * 0},
    ],
)
def test_a_digest_sees_bits_dtypes_shapes_and_names(change):
    assert digest(change(tree())) != digest(tree())


def test_zeros_of_two_signs_have_two_digests():
    assert digest(jnp.zeros(2)) != digest(-jnp.zeros(2))


def test_a_sharded_array_has_the_digest_of_the_whole():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    x = jnp.arange(8.0)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    assert digest(sharded) == digest(x)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        digest({"a": {"b": 1}, "a.b": 2})
