"""A function on one device and the same function on the ranks of a mesh axis."""

import jax
from jax.sharding import PartitionSpec as P

from tests.bits import assert_bit_equal

RANKS = (2, 8)  # examples/own_block.py runs on 1, 2, 4 and 8.
AXIS = "tensor"
ALL, ROWS, COLUMNS = P(), P(AXIS), P(None, AXIS)


def on_ranks(fn, ranks, in_specs, out_specs):
    """`fn` on the first `ranks` devices, its arguments and results sharded as the specs say."""
    mesh = jax.make_mesh((ranks,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def pulled(op):
    """(args, cotangent) -> value and gradients of all args, taken where it runs."""

    def run(args, cotangent):
        value, pull = jax.vjp(op, *args)
        return value, pull(cotangent)

    return run


def assert_as_on_one_device(one, sharded, args, specs, cotangent, out_specs, ranks=RANKS):
    """Value and gradients of `sharded` on every number of ranks have the bits of `one`; each is replicated or sharded
    as its argument is."""
    want = jax.jit(pulled(one))(args, cotangent)
    for n in ranks:
        got = on_ranks(pulled(sharded), n, (specs, out_specs), (out_specs, specs))(args, cotangent)
        assert_bit_equal(got, want)
    return want
