import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tile
from pallas_kernels.region import region_call


def fma_chain(a, b):
    """The promised order in NumPy: float64 holds each product exactly, so one rounding remains a step."""
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for k in range(a.shape[1]):
        product = a[:, k : k + 1].astype(np.float64) * b[:, k].astype(np.float64)
        total = (total.astype(np.float64) + product).astype(np.float32)
    return total


def run(a, b, contract):
    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = tile.dot(a_ref[...], b_ref[...], contract=contract)

    shape = jax.ShapeDtypeStruct((a.shape[1 - contract[0]], b.shape[1 - contract[1]]), jnp.float32)
    return np.asarray(jax.jit(region_call("test.dot", kernel, out_shape=shape))(a, b))


@pytest.mark.parametrize("contract", [(1, 1), (1, 0), (0, 1), (0, 0)])
@pytest.mark.parametrize("depth", [16, 64, 128])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (8, 16), (64, 32), (256, 64), (5, 128), (72, 80), (65, 96), (24, 200)]
)
def test_a_product_is_one_ascending_chain_of_fused_multiply_adds(rows, columns, depth, contract):
    rng = np.random.default_rng(rows + columns + depth)
    a = rng.standard_normal((rows, depth)).astype(np.float32)
    b = rng.standard_normal((columns, depth)).astype(np.float32)
    got = run(a if contract[0] else a.T, b if contract[1] else b.T, contract)
    # float64 addition rounds once more than fma in about one of 2^29 steps; none of these cases meets one.
    np.testing.assert_array_equal(got.view(np.uint32), fma_chain(a, b).view(np.uint32))


def test_a_stock_product_of_narrow_tiles_depends_on_the_number_of_rows():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 64), (64, 32)))

    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = a_ref[...] @ b_ref[...]

    def rows(n):
        shape = jax.ShapeDtypeStruct((n, 32), jnp.float32)
        return np.asarray(jax.jit(region_call("test.stock", kernel, out_shape=shape))(a[:n], b)).view(np.uint32)

    assert (rows(8) != rows(64)[:8]).any()
