"""The one door to Pallas: a kernel whose bits do not depend on the program around it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

type Shapes = jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct]


def region_call(
    name: str,
    kernel: Callable[..., None],
    *,
    out_shape: Shapes,
    gpu: Callable[..., Any] | None = None,
    **spec: Any,
) -> Callable[..., Any]:
    """`pl.pallas_call(kernel, **spec)` as the region `name`.

    On the CPU the kernel is interpreted between optimization barriers, so that XLA cannot
    fuse, contract or reorder it with its neighbours (DESIGN: barrier rule). On a GPU it is
    compiled by Mosaic.

    Args:
        name: The region, as contracts and audits call it, e.g. `"rms_norm"`.
        kernel: The kernel body over refs.
        out_shape: Shape and dtype of every output.
        gpu: Another executor for GPUs (a Hopper kernel with tensor cores), if the region has one.
        **spec: Grid and block specs, as `pl.pallas_call` takes them.

    Returns:
        A function of the kernel's inputs.
    """

    def on_cpu(*args):
        call = pl.pallas_call(kernel, out_shape=out_shape, name=name, interpret=True, **spec)
        return lax.optimization_barrier(call(*lax.optimization_barrier(args)))

    on_gpu = gpu or pl.pallas_call(kernel, out_shape=out_shape, name=name, **spec)
    return lambda *args: lax.platform_dependent(*args, cpu=on_cpu, default=on_gpu)


def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b`, rounded before anything is added to it.

    Inside a kernel a multiplication followed by an addition may contract to a fused
    multiply-add in one program and not in another. The barrier keeps the two roundings.
    """
    return lax.optimization_barrier(a * b)
