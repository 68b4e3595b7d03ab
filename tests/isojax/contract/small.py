"""A contract of two ops, their probes and its identity."""

import jax
import jax.numpy as jnp

from isojax.contract import Probe
from isojax.layouts import Segments
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.segment_sum import segment_sum

SMALL = """
schema_version = 1
name = "small"
mode = "exact"
about = "Two ops"
families = ["test"]

[ops.rms_norm]
computes = "a norm"
phases = ["prefill", "decode", "trainer_forward", "trainer_backward"]
numerics = { row_block = 64 }
probe = { rows = 64, width = 128 }
[ops.rms_norm.regions.rms_norm]
sums = "squares of a row"
order = ["block"]
rounds_to = "compute"
[ops.rms_norm.regions."rms_norm.backward"]
sums = "products of a row"
order = ["block"]
rounds_to = "compute"
backward = true

[ops.segment_sum]
computes = "a sum"
phases = ["trainer_backward"]
probe = { blocks = 2, width = 128 }
[ops.segment_sum.regions.segment_sum]
sums = "blocks, then sequences"
order = ["isojax.trees.chain", "isojax.trees.fold"]
rounds_to = "inputs"

[[claims]]
name = "tensor"
promise = "no bit changes"
over = { tensor = [1, 2, 4] }
proofs = ["verify:tensor"]
"""


def norm_args(sizes, dtype):
    width = sizes["width"]
    return jax.ShapeDtypeStruct((sizes["rows"], width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32)


def sum_args(sizes, dtype):
    del dtype
    return (jax.ShapeDtypeStruct((sizes["blocks"], sizes["width"]), jnp.float32),)


def sum_of_one(partials):
    return segment_sum(partials, Segments(jnp.zeros(partials.shape[0], jnp.int32), 1))


PROBES = {"rms_norm": Probe(rms_norm, norm_args), "segment_sum": Probe(sum_of_one, sum_args)}


def identity(contract, probes=PROBES, *, compute_dtype="bfloat16", model=None):
    programs = contract.programs(probes, compute_dtype=compute_dtype)
    return contract.identity(programs, compute_dtype=compute_dtype, model=model or {"eps": 1e-6})
