"""Traced programs: what they contain, and which part of them a platform runs.

Uses what JAX 0.11 keeps under `jax._src`: there is no public way to a jaxpr's sub-programs and source lines.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
from jax._src.core import Jaxpr, JaxprEqn, Literal, Var
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

REGIONS = frozenset({"pallas_call", "mpmd_map", "core_map"})
"""Primitives whose bodies are kernels: `pl.pallas_call`, and `plgpu.kernel` through `pl.kernel`."""

_SAME_OPERANDS = frozenset(
    {"jit", "call", "closed_call", "core_call", "eval_jaxpr", "remat2", "shard_map"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vmap_call"}
)
_CONTAINERS = _SAME_OPERANDS | {"scan", "while", "cond"}


class Part(NamedTuple):
    """A program inside an equation."""

    label: str
    jaxpr: Jaxpr
    operands: tuple[Any, ...] | None  # The outer atoms that become its inputs, where they do one by one.
    live: bool  # Whether the asked platform runs it.


def trace(fn: Callable[..., Any], *args: Any, platform: str | None = None) -> Jaxpr:
    """The program of `fn`, jitted or not, at the shapes of `args`: arrays or `jax.ShapeDtypeStruct`s.

    Args:
        fn: The function.
        *args: Its arguments.
        platform: What the program is for; by default this process's backend. For another one the ambient
            mesh says so while tracing, which regions ask for their executor.
    """
    platform = platform_name(platform)
    here = platform == platform_name()
    with contextlib.nullcontext() if here else jax.sharding.use_abstract_mesh(_mesh_of(platform)):
        return fn.trace(*args).jaxpr if _is_jitted(fn) else jax.make_jaxpr(fn)(*args).jaxpr


def _mesh_of(platform: str) -> AbstractMesh:
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    return AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=device)


def compiler_options(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The `compiler_options` that `fn` was jitted with. JAX takes them at the outermost jit alone."""
    return dict(fn.trace(*args)._params["compiler_options_kvs"]) if _is_jitted(fn) else {}


def _is_jitted(fn: Any) -> bool:
    return hasattr(fn, "trace") and hasattr(fn, "lower")


def platform_name(platform: str | None = None) -> str:
    """`platform`, or the default backend, as `lax.platform_dependent` calls it: `cpu`, `cuda`, `rocm`, `tpu`."""
    platform = platform or jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def is_container(eqn: JaxprEqn) -> bool:
    """Whether `eqn` only runs the programs in its parameters."""
    return eqn.primitive.name in _CONTAINERS


def parts(eqn: JaxprEqn, platform: str) -> list[Part]:
    """The programs that the container `eqn` runs, of a platform switch with those that `platform` does not run."""
    name = eqn.primitive.name
    if name == "cond":
        chosen = branch_of(eqn, platform)
        branches = enumerate(eqn.params["branches"])
        return [Part("cond", branch, tuple(eqn.invars[1:]), chosen in (None, i)) for i, branch in branches]
    operands = tuple(eqn.invars) if name in _SAME_OPERANDS else None
    programs = [value for value in eqn.params.values() if isinstance(value, Jaxpr)]
    return [Part(name, program, operands, True) for program in programs]


def branch_of(eqn: JaxprEqn, platform: str) -> int | None:
    """The branch that `platform` takes, None where `eqn` is no platform switch, -1 where no branch is for it."""
    choices = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
    if choices is None:
        return None
    return next((i for i, names in enumerate(choices) if names is None or platform in names), -1)


def region_name(eqn: JaxprEqn) -> str | None:
    """The name that a region equation was given, or None."""
    name = eqn.params.get("name")
    return None if name in (None, "", "anonymous", "<lambda>") else str(name)


def regions(jaxpr: Jaxpr, platform: str) -> Iterator[JaxprEqn]:
    """Every region that `platform` runs, in program order, each call site once."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in REGIONS:
            yield eqn
        elif is_container(eqn):
            for part in parts(eqn, platform):
                if part.live:
                    yield from regions(part.jaxpr, platform)


def source(eqn: JaxprEqn) -> tuple[str, int, str]:
    """File, line and function of the user code that made `eqn`."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return "unknown", 0, "unknown"
    return frame.file_name, frame.start_line, frame.function_name.rpartition("<locals>.")[2]


def is_float(atom: Var | Literal) -> bool:
    """Whether a value is floating-point or complex; keys, tokens and `float0` are not."""
    kind = dtype(atom)
    return kind is not None and jax.numpy.issubdtype(kind, jax.numpy.inexact)


def dtype(atom: Var | Literal) -> Any:
    """The dtype of a value; None if it has none, like a token."""
    return getattr(atom.aval, "dtype", None)


def shape_text(atom: Var | Literal) -> str:
    """`float32[8,32]`, the way JAX writes it."""
    return atom.aval.str_short(short_dtypes=False)
