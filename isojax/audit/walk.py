"""Walks a traced program and holds every equation against the rules."""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from isojax import jaxprs
from isojax.audit import rules
from isojax.audit.report import Allow, Finding, Report
from isojax.contract.flags import rounding_reason


def audit(fn: Callable[..., Any], *args: Any, allow: Sequence[Allow] = (), platform: str | None = None) -> Report:
    """Proves of the program of `fn` that every float is computed inside a region.

    The program is traced at the shapes of `args` and walked into every sub-program: jit, scan, while,
    cond, custom derivatives, remat, shard_map. To audit a gradient, pass the gradient function: what autodiff
    inserts (`add_any`, `psum`, `reduce_scatter`, scatter-add) is found like anything else. Outside regions
    only data may move. Also found: a region without a name, an interpreted region
    that no barrier separates from its neighbours, compiler options that change rounding.

    Args:
        fn: The function, jitted or not.
        *args: Arrays or `jax.ShapeDtypeStruct`s; nothing is computed.
        allow: Exceptions, each with its reason; they stay in the report.
        platform: What the program is for; by default this process's backend.
    """
    walk = _Walk(jaxprs.platform_name(platform))
    walk.program(jaxprs.trace(fn, *args, platform=platform), (), set(), live=True)
    for name, value in jaxprs.compiler_options(fn, *args).items():
        if reason := rounding_reason(name, str(value)):
            code = inspect.unwrap(fn).__code__
            place = (code.co_filename, code.co_firstlineno, code.co_name)
            problem = f"compiler option {name}={value}"
            walk.findings[Finding("jit", (), (), *place, (), problem, f"no such option: it {reason}")] += 1
    findings, allowed = Counter(), []
    for finding, count in walk.findings.items():
        reasons = [a.reason for a in allow if a.covers(finding)]
        if reasons:
            allowed.append((finding, reasons[0]))
        else:
            findings[finding] = count
    return Report(findings, tuple(allowed), walk.regions, walk.platform)


def dtype_signature(
    fn: Callable[..., Any], *args: Any, platform: str | None = None
) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Name, input dtypes and output dtypes of every region of `fn`, in program order.

    A test stores this list: an autocast that somebody puts around the scored path
    changes a dtype in it (slime#830).
    """
    platform = jaxprs.platform_name(platform)
    return [
        (jaxprs.region_name(eqn) or "unnamed", _dtypes(eqn.invars), _dtypes(eqn.outvars))
        for eqn in jaxprs.regions(jaxprs.trace(fn, *args, platform=platform), platform)
    ]


class _Barriers:
    """Which variables of a program come out of a barrier, and which something else than a barrier reads."""

    def __init__(self, jaxpr: Jaxpr):
        self.fenced: set[Var] = set()
        self.read = {v for v in jaxpr.outvars if isinstance(v, Var)}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "optimization_barrier":
                self.fenced.update(eqn.outvars)
            else:
                self.read.update(v for v in eqn.invars if isinstance(v, Var))

    def separate(self, eqn: JaxprEqn) -> bool:
        """Whether barriers alone feed `eqn` and alone read it, so that XLA cannot fuse its interpreted body."""
        inputs = all(isinstance(atom, Literal) or atom in self.fenced for atom in eqn.invars)
        return inputs and not self.read.intersection(v for v in eqn.outvars if not isinstance(v, DropVar))


class _Walk:
    def __init__(self, platform: str):
        self.platform = platform
        self.findings: Counter[Finding] = Counter()
        self.regions: Counter[str] = Counter()

    def program(self, jaxpr: Jaxpr, path: tuple[str, ...], constants: set[Var], *, live: bool) -> None:
        barriers = _Barriers(jaxpr)
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in jaxprs.REGIONS:
                self.region(eqn, barriers, path, live)
            elif jaxprs.is_container(eqn):
                for part in jaxprs.parts(eqn, self.platform):
                    inner = {
                        v
                        for v, atom in zip(part.jaxpr.invars, part.operands or (), strict=False)
                        if rules.is_constant(atom, constants)
                    }
                    self.program(part.jaxpr, (*path, part.label), inner, live=live and part.live)
            elif problem := rules.problem(eqn, constants):
                self.found(eqn, path, *problem)
            elif all(rules.is_constant(atom, constants) for atom in eqn.invars):
                constants.update(eqn.outvars)

    def region(self, eqn: JaxprEqn, barriers: _Barriers, path: tuple[str, ...], live: bool) -> None:
        name = jaxprs.region_name(eqn)
        if name is None:
            self.found(eqn, path, "a kernel without a name", "region_call with the region's name")
        elif live:
            self.regions[name] += 1
        if eqn.params.get("interpret") and not barriers.separate(eqn):
            self.found(eqn, path, f"interpreted kernel {name} without barriers", "region_call, which puts them there")

    def found(self, eqn: JaxprEqn, path: tuple[str, ...], problem: str, use: str) -> None:
        operands, results = (tuple(map(jaxprs.shape_text, atoms)) for atoms in (eqn.invars, eqn.outvars))
        name = eqn.primitive.name
        self.findings[Finding(name, operands, results, *jaxprs.source(eqn), path, problem, use)] += 1


def _dtypes(atoms: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(jaxprs.dtype(atom)) for atom in atoms)
