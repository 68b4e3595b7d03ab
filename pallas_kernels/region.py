"""The one door to Pallas: a kernel whose bits do not depend on the program around it."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.experimental.pallas.fuser  # Adds a setting to JAX: later, it would void what was traced.
from jax import lax
from jax.experimental import pallas as pl

from isojax.errors import ExecutorError

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
    fuse, contract or reorder it with its neighbours (docs/rules.md, rule 2). On a GPU another executor runs,
    and without one the region is refused. Which of the two is settled when the program is traced: a trace then
    holds one executor, which is what an audit reads and a digest hashes.

    Args:
        name: The region, as contracts and audits call it, e.g. `"rms_norm"`.
        kernel: The kernel body over refs.
        out_shape: Shape and dtype of every output.
        gpu: The executor for GPUs, a Mosaic GPU kernel, if there is one for these inputs.
        **spec: Grid and block specs, as `pl.pallas_call` takes them.

    Returns:
        A function of the kernel's inputs.

    Raises:
        ExecutorError: If the program is traced for a platform on which the region cannot run.
    """
    if (platform := traced_for()) != "cpu":
        if gpu is None:
            raise ExecutorError(
                f"region {name} has no executor on {platform} for these inputs yet; docs/gpu.md lists those there are:"
                " run on the CPU with JAX_PLATFORMS=cpu"
            )
        return gpu
    call = pl.pallas_call(kernel, out_shape=out_shape, name=name, interpret=True, **spec)
    return lambda *args: lax.optimization_barrier(call(*lax.optimization_barrier(args)))


def traced_for() -> str:
    """The platform that programs are traced for: of the ambient mesh's abstract device, else of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def mosaic() -> ModuleType:
    """`pallas_kernels.mosaic`, imported where it runs: Mosaic GPU takes more than a second to import."""
    from pallas_kernels import mosaic

    return mosaic


def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b`, rounded before anything is added to it.

    Inside a kernel a multiplication followed by an addition may contract to a fused
    multiply-add in one program and not in another. The barrier keeps the two roundings.
    """
    return lax.optimization_barrier(a * b)
