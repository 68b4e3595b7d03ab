"""A block of one's own under `shard_map`: one loss and one gradient for every tensor parallelism."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import P, lax

import isojax
from isojax.errors import AuditError
from tests.bits import assert_bit_equal, differing


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[2] / "examples" / "own_block.py"
    spec = importlib.util.spec_from_file_location("own_block", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tensor_parallelism_has_one_loss_and_one_gradient(example, dtype):
    args = example.arguments(jnp.dtype(dtype))
    want = example.step(1)(*args)
    for tp in (2, 4, 8):
        assert_bit_equal(example.step(tp)(*args), want)


def test_the_script_says_so(example, capsys):
    example.main()
    assert capsys.readouterr().out.split() == ["1", "True", "2", "True", "4", "True", "8", "True"]


def test_lax_psum_in_its_place_has_another_gradient_and_is_named_by_the_audit(example, monkeypatch):
    args = example.arguments()
    _, (want, _) = example.step(8)(*args)
    monkeypatch.setattr(example.collectives, "psum", lax.psum)
    _, (got, _) = example.step(8)(*args)
    assert differing(got["scale"], want["scale"])
    with pytest.raises(AuditError, match=r"own_block\.py:\d+ \(loss\) lax\.psum .* use collectives\.psum"):
        isojax.audit(example.step(8), *args).raise_if_findings()


def test_a_gradient_taken_outside_is_refused_by_the_audit(example):
    """There `shard_map` divides the cotangent of the loss by the ranks, and adds those of replicated inputs."""
    args, mesh = example.arguments(), jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (example.SPECS, example.ROWS, example.ROWS)
    outside = jax.grad(jax.shard_map(example.loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    found = {finding.primitive for finding in isojax.audit(jax.jit(outside), *args).findings}
    assert {"div", "psum"} <= found
