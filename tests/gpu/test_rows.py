"""Bits of row-wise regions on an H200, over blocks, numbers of rows and neighbours; and their meaning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from pallas_kernels import mosaic
from pallas_kernels.tree_sum import tree_sum
from tests.gpu.row_cases import CASES, GRADIENTS, fan_out, gradient

pytestmark = pytest.mark.gpu

COUNT = 257
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3}  # Of the norm: a rounding of bfloat16 is 2^-9, `exp` differs by 2 ulp.


_ROW_CALL = mosaic.row_call


def _row_call(rows_of_a_program, *args, block, **settings):
    return _ROW_CALL(*args, block=rows_of_a_program, **settings)


def leaves(results):
    return [np.asarray(x) for x in jax.tree.leaves(results)]


def bits(results):
    return [x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]) for x in leaves(results)]


def assert_same(got, want, where=slice(None)):
    for a, b in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(a, b[where])


def assert_close(got, want, tolerance):
    for a, b in zip(leaves(got), leaves(want), strict=True):
        if a.dtype == np.int32:
            np.testing.assert_array_equal(a, b)
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def on_cpu(fn, args):
    """Not jitted: XLA on the CPU may keep more than bfloat16 between two operations."""
    device = jax.devices("cpu")[0]
    with jax.default_device(device):
        return fn(*(jax.device_put(x, device) for x in args))


def few(case, args, where):
    return [x[where] if i < len(case.rows) else x for i, x in enumerate(args)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_region_means_its_definition(name, dtype):
    case = CASES[name]
    args = case.arguments(COUNT, dtype)
    assert_close(jax.jit(case.op)(*args), on_cpu(case.reference, args), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_means_that_of_the_definition(name, dtype):
    case = CASES[name]
    args = case.arguments(COUNT, dtype)
    got, want = jax.jit(gradient(case.op))(*args), on_cpu(gradient(case.reference), args)
    constant = {"norm_rope": 2, "norm_rope.keys": 2}.get(name, 0)  # Tables have no gradient.
    if constant:
        got, want = (list(g[:1]) + list(g[1 + constant :]) for g in (got, want))
    assert_close(got, want, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_a_row_keeps_its_bits_in_any_company_and_program(name):
    """B002 for every region: launches of 1, 33, 64, 255, 256 and 257 rows, reversed, inside a larger program."""
    case = CASES[name]
    args = case.arguments(COUNT, "bfloat16")
    op = jax.jit(case.op)
    want = op(*args)
    for count in (1, 33, 64, 255, 256):
        assert_same(op(*few(case, args, slice(count))), want, slice(count))
    backwards = slice(None, None, -1)
    assert_same(op(*few(case, args, backwards)), want, backwards)
    larger = jax.jit(lambda *args: (case.op(*(x * 1 for x in args)), [x + x for x in jax.tree.leaves(case.op(*args))]))
    assert_same(larger(*args)[0], want)


@pytest.mark.parametrize("name", CASES)
def test_no_block_of_rows_changes_a_bit(name, monkeypatch):
    case = CASES[name]
    args = case.arguments(COUNT, "bfloat16")
    want = jax.jit(case.op)(*args)
    for block in (2, 3, 16):
        monkeypatch.setattr(mosaic, "row_call", functools.partial(_row_call, block))
        jax.clear_caches()
        assert_same(jax.jit(lambda *args: case.op(*args))(*args), want)


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_row_keeps_its_bits_in_any_company(name):
    case = CASES[name]
    args = case.arguments(COUNT, "bfloat16")
    run = jax.jit(gradient(case.op))
    of_rows = sum(jnp.issubdtype(x.dtype, jnp.floating) for x in args[: len(case.rows)])
    want = run(*args)[:of_rows]
    for count in (1, 64, 192):
        assert_same(run(*few(case, args, slice(count)))[:of_rows], want, slice(count))


@pytest.mark.parametrize("name", ["rms_norm", "gdn_gates"])
def test_sums_over_rows_are_the_chain_of_their_blocks(name):
    """Blocks of 64 rows that come in another launch, and are added on the host, give the same gradient."""
    case = CASES[name]
    args = case.arguments(192, "bfloat16")
    run = jax.jit(gradient(case.op))
    shared = slice(len(case.rows), None)
    blocks = [leaves(run(*few(case, args, slice(i, i + 64)))[shared]) for i in (0, 64, 128)]
    want = [(a + b) + c for a, b, c in zip(*blocks, strict=True)]
    assert_same(run(*args)[shared], want)


def test_the_gradient_of_a_fork_is_a_chain():
    x = jax.random.normal(jax.random.key(0), (65, 2048), jnp.bfloat16)
    (got,) = jax.jit(gradient(fan_out))(x)
    grad = (x * x).astype(jnp.float32)
    assert_same(got, ((grad + grad) + grad).astype(jnp.bfloat16))


def test_stock_rms_norm_does_not_keep_a_rows_bits_inside_a_program():
    """The negative control: the same definition, left to XLA, differs between 1 and 8,192 rows."""
    case = CASES["rms_norm"]
    args = case.arguments(8192, "float32")
    op = jax.jit(case.reference)
    differs = [(bits(op(*few(case, args, slice(n))))[0] != bits(op(*args))[0][:n]).any() for n in (1, 16, 256)]
    assert any(differs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(8, 3, 700), (5, 1)])
def test_parts_are_added_in_tree_order(shape, dtype):
    parts = jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)
    want = trees.fold(np.add, list(np.asarray(parts, np.float32))).astype(dtype)
    assert_same([jax.jit(tree_sum)(parts)], [want])
