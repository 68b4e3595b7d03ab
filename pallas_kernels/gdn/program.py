"""Regions over trees of arrays whose second axis is heads."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.region import region_call


def over_heads(name: str, kernel: Callable[[Any, Any], None], inputs: Any, outputs: Any, programs: int) -> Any:
    """Runs `kernel(input refs, output refs)`, each program with its share of the heads.

    Args:
        name: The region.
        kernel: Takes trees of refs like `inputs` and `outputs`.
        inputs: A tree of arrays. Those of three axes or more have heads second and are cut; others come whole.
        outputs: A tree of shapes and dtypes, likewise.
        programs: Into how many shares heads are cut; divides all of them.
    """
    in_leaves, in_tree = jax.tree.flatten(inputs)
    out_leaves, out_tree = jax.tree.flatten(outputs)

    def body(*refs):
        kernel(in_tree.unflatten(refs[: len(in_leaves)]), out_tree.unflatten(refs[len(in_leaves) :]))

    def spec(x):
        if x.ndim < 3:
            return pl.BlockSpec(x.shape, lambda h: (0,) * x.ndim)
        return pl.BlockSpec((x.shape[0], x.shape[1] // programs, *x.shape[2:]), lambda h: (0, h) + (0,) * (x.ndim - 2))

    results = region_call(
        name,
        body,
        out_shape=out_leaves,
        grid=(programs,),
        in_specs=[spec(x) for x in in_leaves],
        out_specs=[spec(x) for x in out_leaves],
    )(*in_leaves)
    return out_tree.unflatten(results)


def num_programs(key_heads: int, per_program: int) -> int:
    """Programs for `key_heads`, of at most `per_program` each as far as that divides."""
    return key_heads // math.gcd(key_heads, per_program)
