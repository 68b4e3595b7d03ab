"""A contract in use: which numerics an op has, which regions may run, what is claimed."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from isojax import jaxprs
from isojax.contract.canonical import JSON, sha256
from isojax.contract.deployment import deployment_facts
from isojax.contract.document import Document, Op, Region
from isojax.contract.flags import refuse_rounding_flags
from isojax.contract.identity import Identity
from isojax.contract.programs import gradient_program, serialised
from isojax.errors import ContractError, ShardingError

type Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Probe:
    """How an op is traced for its digest.

    Attributes:
        fn: The op, bound to the contract's numerics, at its canonical schedule.
        args: Makes its arguments from the sizes that the document names and the compute dtype:
            arrays or `jax.ShapeDtypeStruct`s. Settings that are no arrays belong into `fn`.
    """

    fn: Callable[..., Any]
    args: Callable[[Sizes, np.dtype], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Contract:
    """A document that was checked, with what programs ask of it."""

    document: Document

    @property
    def name(self) -> str:
        """As users call it: `exact`, `native`."""
        return self.document.name

    @property
    def digest(self) -> str:
        """SHA-256 of the document's content; `identity` has the digests that peers compare."""
        return sha256(_plain(self.document.model_dump(mode="json")))

    @property
    def regions(self) -> dict[str, Region]:
        """Every region that may run, by name."""
        return {name: region for op in self.document.ops.values() for name, region in op.regions.items()}

    def op(self, name: str) -> Op:
        """What the document says about an op.

        Raises:
            ContractError: If it says nothing.
        """
        if name not in self.document.ops:
            raise ContractError(f"contract {self.name} has no op {name!r}: it has {', '.join(self.document.ops)}")
        return self.document.ops[name]

    def numerics(self, op: str, phase: str) -> dict[str, bool | int | str]:
        """The arguments of `op` that decide bits: one set for all phases, trainer and engine alike.

        Raises:
            ContractError: If the contract has no such op or does not run it in `phase`.
        """
        entry = self.op(op)
        if phase not in entry.phases:
            raise ContractError(f"contract {self.name} runs {op} in {', '.join(entry.phases)}, not in {phase!r}")
        return dict(self.op(entry.same_as or op).numerics)

    def proofs(self) -> dict[str, list[str]]:
        """The executable proofs of each claim."""
        return {claim.name: list(claim.proofs) for claim in self.document.claims}

    def refuse_unknown_regions(self, names: Iterable[str]) -> None:
        """Refuses a program that runs regions which the contract does not know, e.g. `Report.regions` of an audit.

        Raises:
            ContractError: Names them.
        """
        known = {_undotted(region) for region in self.regions}
        if unknown := sorted(name for name in set(names) if _undotted(name) not in known):
            raise ContractError(
                f"contract {self.name} says nothing about {', '.join(unknown)}: bind the ops from the contract, or"
                " describe these regions in its document"
            )

    def refuse_unclaimed(self, **settings: bool | int | str) -> None:
        """Refuses settings that no claim covers, e.g. `tensor=6`.

        Raises:
            ShardingError: Names every one with the values that are claimed.
        """
        covered = {key: values for claim in self.document.claims for key, values in claim.over.items()}
        problems = [
            f"{key}={value} is not claimed by contract {self.name}: use {', '.join(map(str, covered[key]))}"
            if key in covered
            else f"contract {self.name} claims nothing about {key}"
            for key, value in settings.items()
            if self.document.mode == "exact" and value not in covered.get(key, ())
        ]
        if problems:
            raise ShardingError("\n  ".join(problems))

    def identity(
        self,
        programs: Mapping[str, str],
        *,
        compute_dtype: str,
        model: Mapping[str, Any] | None = None,
    ) -> Identity:
        """What a peer must share: the function, orders and precisions with the programs themselves, the deployment.

        Args:
            programs: The digests of its `programs`.
            compute_dtype: The model's, `bfloat16` or `float32`.
            model: The model's configuration, as JSON types; floats are kept by their bits.

        Raises:
            ContractError: If compiler flags can change roundings.
        """
        refuse_rounding_flags()
        document = self.document
        semantic = {"model": sha256(_plain(dict(model or {}))), "compute_dtype": compute_dtype}
        policy = {"mode": document.mode}
        for name, op in document.ops.items():
            semantic[name] = sha256({"computes": op.computes, "phases": list(op.phases)})
            numerics = {"numerics": op.numerics, "same_as": op.same_as}
            policy[name] = sha256(_plain(numerics | {r: region.model_dump() for r, region in op.regions.items()}))
        return Identity(document.name, semantic, policy | dict(programs), deployment_facts())

    def programs(
        self, probes: Mapping[str, Probe], *, compute_dtype: str, platform: str | None = None
    ) -> dict[str, str]:
        """The digest of the program of every op, and of its gradient where it has regions in one.

        Nothing is computed: ops are traced. A native contract promises no programs and has none.

        Args:
            probes: How to trace each op of the document, by name.
            compute_dtype: The model's, `bfloat16` or `float32`.
            platform: Whose programs; by default those of the default backend.

        Raises:
            ContractError: If a probe is missing or superfluous, a program runs a region that is not in the document, or
                a region of the document runs in no program.
        """
        if self.document.mode == "native":
            return {}
        dtype, platform = np.dtype(compute_dtype), jaxprs.platform_name(platform)
        missing, unknown = set(self.document.ops) - set(probes), set(probes) - set(self.document.ops)
        if missing or unknown:
            absent, odd = (", ".join(sorted(group)) or "none" for group in (missing, unknown))
            raise ContractError(
                f"contract {self.name} is identified by the programs of its ops: without a probe {absent}; probes of no"
                f" op {odd}"
            )
        digests, seen = {}, set()
        for name, op in self.document.ops.items():
            traced = {"program": (probes[name].fn, *_arguments(name, op, probes[name], dtype))}
            if any(region.backward for region in op.regions.values()):
                traced["gradient"] = gradient_program(*traced["program"])
            for kind, (fn, *args) in traced.items():
                jaxpr = jaxprs.trace(fn, *args, platform=platform)
                digests[f"{name} {kind}"] = sha256(serialised(jaxpr, platform))
                found = jaxprs.regions(jaxpr, platform)
                seen |= {jaxprs.region_name(eqn) or f"an unnamed kernel of {name}" for eqn in found}
        self.refuse_unknown_regions(seen)
        ran = {_undotted(region) for region in seen}
        if idle := sorted(region for region in self.regions if _undotted(region) not in ran):
            raise ContractError(
                f"no program of contract {self.name} runs {', '.join(idle)}: the ops are bound to something else, or"
                " the document names regions that are gone"
            )
        return digests


def _undotted(region: str) -> str:
    """A region as kernels of GPUs call it: names in PTX have no dots."""
    return region.replace(".", "_")


def _arguments(name: str, op: Op, probe: Probe, dtype: np.dtype) -> tuple[Any, ...]:
    try:
        return tuple(probe.args(op.probe, dtype))
    except KeyError as error:
        raise ContractError(f"the probe of {name} needs the size {error}, its document has {dict(op.probe)}") from error


def _plain(value: Any) -> JSON:
    """JSON without floats: they are written by their bits."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": value.hex()}
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    raise ContractError(f"an identity is made of JSON types, got {type(value).__name__}: {value!r}")
