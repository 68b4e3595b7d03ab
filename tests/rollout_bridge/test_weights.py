"""Fingerprints of weights, and names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isojax.errors import WeightsError
from rollout_bridge.weights import Weights, digests, flatten, total_digest, unflatten
from tests.rollout_bridge.engines import OPS, config, policy


def test_names_go_there_and_back():
    params = policy().params()
    flat = flatten(params)
    assert "layers.3.mixer.q_proj" in flat
    back = unflatten(flat)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert digests(back) == digests(params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_counts(dtype):
    value = np.random.default_rng(0).standard_normal((5, 7)).astype(jnp.dtype(dtype))
    [before] = digests({"w": value}).values()
    word = {2: np.uint16, 4: np.uint32}[value.dtype.itemsize]
    seen = {before}
    for bit in range(8 * value.dtype.itemsize):
        other = value.view(word).copy()
        other[3, 4] ^= word(1 << bit)
        seen |= set(digests({"w": other.view(value.dtype)}).values())
    assert len(seen) == 1 + 8 * value.dtype.itemsize


def test_place_shape_and_name_count():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert digests({"w": a})["w"] != digests({"w": a.T.copy()})["w"]
    assert digests({"w": a})["w"] != digests({"w": a[::-1].copy()})["w"]
    assert total_digest(digests({"w": a})) != total_digest(digests({"v": a}))


def test_sharding_does_not_count():
    value = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharded = jax.device_put(value, NamedSharding(mesh, PartitionSpec("x")))
    assert digests({"w": sharded}) == digests({"w": value})


def test_matrices_are_rounded_once_and_vectors_are_shared():
    params = policy().params()
    weights = Weights(config(compute_dtype="bfloat16"), OPS)
    own = weights.load(params)
    flat, given = flatten(weights.params), flatten(params)
    assert flat["layers.0.mixer.out_proj"].dtype == jnp.bfloat16
    for name in ("layers.0.mixer.A_log", "norm"):
        assert flat[name].unsafe_buffer_pointer() == given[name].unsafe_buffer_pointer()
    assert own == sum(v.nbytes for v in flat.values() if v.dtype == jnp.bfloat16)
    np.testing.assert_array_equal(
        flat["lm_head"].view(np.uint16), np.asarray(given["lm_head"]).astype(jnp.bfloat16).view(np.uint16)
    )


def writable(value) -> np.ndarray:
    """A host array that JAX could use without a copy."""
    buffer = np.empty(value.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    array = buffer[start : start + value.nbytes].view(np.float32).reshape(value.shape)
    array[...] = value
    return array


def test_host_arrays_are_copied():
    params = jax.tree.map(writable, policy().params())
    weights = Weights(config(), OPS)
    weights.load(params)
    for array in flatten(params).values():
        array[...] = 7
    assert total_digest(digests(weights.params)) == weights.digest


def test_what_changed_on_its_way_is_refused():
    params = policy().params()
    weights = Weights(config(), OPS)
    weights.load(params)
    sent = digests(params)
    broken = dict(params) | {"norm": params["norm"].at[5].add(1e-7)}
    with pytest.raises(WeightsError, match="norm"):
        weights.update(broken, sent)
    assert weights.version == 0
    assert weights.update(params, sent) == 1


def test_weights_that_are_gone_are_not_used():
    weights = Weights(config(), OPS)
    weights.load(policy().params())
    weights.sleep(2)
    with pytest.raises(WeightsError, match="sleep"):
        _ = weights.params
    weights.update(policy().params())
    assert weights.awake
