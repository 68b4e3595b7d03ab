"""Row-wise regions lower for a GPU. No device is needed: Mosaic GPU chooses layouts and emits code on the CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from isojax.errors import ExecutorError
from pallas_kernels.global_norm import global_norm
from pallas_kernels.linear import row_linear
from pallas_kernels.rows import row_op
from pallas_kernels.tree_sum import tree_sum
from tests.gpu.row_cases import CASES, GRADIENTS, fan_out, gradient

H200 = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", None, "cuda")
)


def lowered(fn, *shapes) -> str:
    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", CASES)
def test_a_row_wise_region_lowers_through_mosaic_gpu_and_not_through_triton(name):
    text = lowered(CASES[name].op, *CASES[name].shapes(257, "bfloat16"))
    assert "mosaic_gpu" in text
    assert "triton" not in text


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_row_wise_gradient_lowers_through_mosaic_gpu_and_not_through_triton(name):
    text = lowered(gradient(GRADIENTS[name].op), *GRADIENTS[name].shapes(65, "bfloat16"))
    assert "mosaic_gpu" in text
    assert "triton" not in text


def test_the_gradient_of_a_fork_lowers():
    assert "mosaic_gpu" in lowered(gradient(fan_out), jax.ShapeDtypeStruct((65, 2048), jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_tree_over_parts_lowers(dtype):
    text = lowered(tree_sum, jax.ShapeDtypeStruct((8, 3, 700), dtype))
    assert "mosaic_gpu" in text
    assert "triton" not in text


@pytest.mark.parametrize(
    ("op", "inputs", "region"),
    [
        (lambda x: row_linear(x, x), (64, 64), "linear.row"),  # float32: Hopper's product takes bfloat16.
        (lambda x: global_norm({"w": x}), (64, 64), "global_norm"),
    ],
)
def test_a_region_without_an_executor_is_refused_by_name(op, inputs, region):
    with pytest.raises(ExecutorError, match=rf"region {region}[a-z.]* has no executor on cuda .* JAX_PLATFORMS=cpu"):
        lowered(op, jax.ShapeDtypeStruct(inputs, jnp.float32))


def test_what_lanes_cannot_do_is_refused_in_words():
    flip = row_op("flip", lambda x: x.reshape(-1, 2, 64))
    with pytest.raises(ValueError, match="a row function on a GPU keeps its axes"):
        lowered(flip, jax.ShapeDtypeStruct((8, 128), jnp.float32))
