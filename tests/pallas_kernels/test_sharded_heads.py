"""Heads and channels on the ranks of a mesh axis: mixers with the bits of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import isojax
from isojax import collectives, ops
from isojax.contract import load
from isojax.errors import ShardingError
from isojax.layouts import Segments
from pallas_kernels.step import Chunks
from tests.bits import assert_bit_equal, differing
from tests.pallas_kernels.attention_cases import NUMERICS, batch, sequence
from tests.pallas_kernels.meshes import ALL, AXIS, COLUMNS, ROWS, assert_as_on_one_device, on_ranks, pulled

HEADS = P(None, AXIS)  # Of [rows, heads, width].
BLOCK_HEADS = P(None, None, AXIS)  # Of [blocks, 64, heads, width] and of pools [pages, 2, heads, tokens, width].
SEGMENTS = Segments(jnp.asarray(np.array([0, 0, 2]), jnp.int32), 3)
# Of sequence, index, begin, end of each block.
CELLS = jnp.asarray([(0, 0, 0, 64), (0, 1, 0, 20), (2, 0, 0, 64)], jnp.int32)
CHUNKS = Chunks(*CELLS.T, num_sequences=3)
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def norm_rope(heads, dtype):
    tables = [jnp.asarray(table)[:192] for table in ops.rotary_tables(256, 8, 1e7)]

    def op(x, scale, axis_name=None):
        return ops.norm_rope(x, scale, *tables, segments=SEGMENTS, axis_name=axis_name)

    return op, (random(0, 192, heads, 32, dtype=dtype), random(1, 32)), (HEADS, ALL)


def gated_norm(heads, dtype):
    def op(o, z, scale, axis_name=None):
        return ops.gated_norm(o, z, scale, segments=SEGMENTS, axis_name=axis_name)

    o, z = (random(i, 192, heads, 32, dtype=dtype) for i in range(2))
    return op, (o, z, random(2, 32)), (HEADS, HEADS, ALL)


@DTYPES
@pytest.mark.parametrize("heads", [8, 24])  # A head a split, and three.
@pytest.mark.parametrize("case", [norm_rope, gated_norm])
def test_a_scale_that_heads_on_ranks_share_has_the_gradient_of_one_device(case, heads, dtype):
    op, args, specs = case(heads, dtype)
    cotangent = random(5, 192, heads, 32, dtype=dtype)
    assert_as_on_one_device(
        op, lambda *args: op(*args, axis_name=AXIS), args, specs, cotangent, HEADS, ranks=(2, 8) if heads == 8 else (4,)
    )


@pytest.mark.parametrize("case", [norm_rope, gated_norm])
def test_scales_of_ranks_added_afterwards_are_another_sum(case):
    """Negative control: heads meet in each block of rows, not after the sequences."""
    op, args, specs = case(8, "float32")

    def gradient(axis_name):
        def run(*args):
            grad = jax.vjp(lambda scale: op(*args[:-1], scale, axis_name), args[-1])[1](args[0])[0]
            return grad if axis_name else collectives.psum(grad, AXIS)

        return on_ranks(run, 4, specs, ALL)(*args)

    assert differing(gradient(AXIS), gradient(None))


@DTYPES
def test_gates_and_convolutions_of_ranks_are_those_of_one_device(dtype):
    a, b = (random(i, 192, 8, dtype=dtype) for i in range(2))
    assert_as_on_one_device(
        *[lambda *args: ops.gdn_gates(*args, segments=SEGMENTS)] * 2,
        (a, b, random(2, 8), random(3, 8)),
        (COLUMNS, COLUMNS, ROWS, ROWS),
        (random(4, 192, 8), random(5, 192, 8)),
        (COLUMNS, COLUMNS),
    )
    assert_as_on_one_device(
        *[lambda x, weight: ops.causal_conv_chunks(x, None, weight, CHUNKS, segments=SEGMENTS)[0]] * 2,
        (random(0, 3, 64, 48, dtype=dtype), random(1, 48, 4)),
        (BLOCK_HEADS, ROWS),
        random(2, 3, 64, 48, dtype=dtype),
        BLOCK_HEADS,
    )


@DTYPES
def test_the_delta_rule_of_heads_on_ranks_is_that_of_one_device(dtype):
    q, k = (0.2 * random(i, 3, 64, 4, 16) for i in range(2))
    g, beta = -jnp.abs(random(3, 3, 64, 8)), jax.nn.sigmoid(random(4, 3, 64, 8))

    def op(*args):
        return ops.gdn_chunks(*args, CHUNKS, jnp.zeros((3, args[3].shape[-1], 16, 16)))[0]

    args = (q.astype(dtype), k.astype(dtype), random(2, 3, 64, 8, 16, dtype=dtype), g, beta)
    cotangent = random(5, 3, 64, 8, 16, dtype=dtype)
    assert_as_on_one_device(
        op, op, args, (BLOCK_HEADS,) * 5, cotangent, BLOCK_HEADS, ranks=(2,) if dtype == "float32" else (4,)
    )


@DTYPES
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_of_heads_on_ranks_is_that_of_one_device(kv_heads, dtype):
    """With KV heads of their own ranks exchange nothing; query heads of one KV head meet in their tree."""
    shares = kv_heads == 1
    sequences = [sequence(i, n, heads=8, kv_heads=kv_heads, dtype=dtype) for i, n in enumerate((100, 0, 70))]
    *arrays, chunks = batch(sequences, dead=0)
    q, kv, table = map(jnp.asarray, arrays)

    def op(axis_name):
        def run(q, kv):
            return ops.attention_chunks(q, kv, table, chunks, scale=0.3, axis_name=axis_name, numerics=NUMERICS)

        return run

    args = jnp.nan_to_num(q), kv
    specs = (BLOCK_HEADS, ALL if shares else BLOCK_HEADS)
    cotangent = random(1, *q.shape, dtype=dtype)
    ranks = (2, 8) if shares else (2, 4)
    assert_as_on_one_device(op(None), op(AXIS if shares else None), args, specs, cotangent, BLOCK_HEADS, ranks=ranks)


def test_query_heads_that_are_no_subtree_are_refused():
    *arrays, chunks = batch([sequence(i, 64, heads=6, kv_heads=1) for i in range(3)])
    q, kv, table = map(jnp.asarray, arrays)
    run = on_ranks(
        lambda q, kv: ops.attention_chunks(q, kv, table, chunks, axis_name=AXIS), 2, (BLOCK_HEADS, ALL), BLOCK_HEADS
    )
    with pytest.raises(ShardingError, match="attention_chunks got 3 terms a rank over tensor=2"):
        run(q, kv)


def attention_layer(weights, x, tensor=None, kv=None, replicas=None, shared_by=None):
    """Projections, norms, attention and output of a layer, on the mesh axes that heads are sharded over."""
    replicas = (None, replicas, replicas)
    q, k, v = ops.column_linear(
        x, (weights["q"], weights["k"], weights["v"]), segments=SEGMENTS, axis_name=tensor, replicas=replicas
    )
    tables = [jnp.asarray(table)[: x.shape[0]] for table in ops.rotary_tables(256, 8, 1e7)]
    q, k, v = (y.reshape(-1, y.shape[1] // 16, 16) for y in (q, k, v))
    q = ops.norm_rope(q, weights["q_norm"], *tables, segments=SEGMENTS, axis_name=tensor)
    k = ops.norm_rope(k, weights["k_norm"], *tables, segments=SEGMENTS, axis_name=kv)
    pages = [y.reshape(-1, 64, *y.shape[1:]) for y in (q, k, v)]
    pool = jnp.stack(pages[1:], axis=1).swapaxes(2, 3)
    table = jnp.asarray([[0, 1], [0, 0], [2, 2]], jnp.int32)
    y = ops.attention_chunks(pages[0], pool, table, CHUNKS, axis_name=shared_by, numerics=NUMERICS)
    return ops.row_linear(y.reshape(x.shape[0], -1), weights["o"], segments=SEGMENTS, axis_name=tensor)


TENSOR = ("kv", "group")
WEIGHTS = {"q": P(TENSOR), "k": P("kv"), "v": P("kv"), "o": P(None, TENSOR), "q_norm": ALL, "k_norm": ALL}


def layer_arguments():
    weights = {name: 0.2 * random(i, rows, 48) for i, (name, rows) in enumerate((("q", 128), ("k", 32), ("v", 32)))}
    weights |= {"o": 0.1 * random(3, 48, 128), "q_norm": random(4, 16), "k_norm": random(5, 16)}
    x, cotangent = (random(i, 192, 48, dtype="bfloat16") for i in (6, 7))
    return (weights, x), cotangent


def layer_on_ranks(groups, replicas="group", shared_by="group"):
    mesh = jax.make_mesh((2, groups), TENSOR, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.shard_map(
        pulled(lambda *args: attention_layer(*args, TENSOR, "kv", replicas, shared_by)),
        mesh=mesh,
        in_specs=((WEIGHTS, ALL), ALL),
        out_specs=(ALL, (WEIGHTS, ALL)),
        check_vma=False,
    )


def test_a_layer_with_more_ranks_than_kv_heads_has_the_bits_of_one_device():
    """Two KV heads: the mesh axis of KV heads times that of the query heads which share one is the tensor axis."""
    run, args = layer_on_ranks(4), layer_arguments()
    assert_bit_equal(jax.jit(run)(*args), jax.jit(pulled(attention_layer))(*args))
    report = isojax.audit(run, *args)
    assert not report.findings
    load("exact").refuse_unknown_regions(report.regions)


def test_an_axis_that_is_left_out_shows():
    """Negative control: what ranks have twice is counted twice, and what they lack is missing."""
    args = layer_arguments()
    want, (want_weights, want_x) = jax.jit(pulled(attention_layer))(*args)
    value, (weights, x) = jax.jit(layer_on_ranks(2, replicas=None))(*args)
    assert_bit_equal((value, weights), (want, want_weights))
    assert differing(x, want_x)
    value, (weights, _) = jax.jit(layer_on_ranks(2, shared_by=None))(*args)
    assert_bit_equal((value, weights["q"]), (want, want_weights["q"]))
    assert differing(weights["k"], want_weights["k"])
