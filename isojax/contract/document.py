"""The typed form of a contract document."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from isojax import trees

Phase = Literal["prefill", "decode", "score", "trainer_forward", "trainer_backward"]
Order = Literal["block", "isojax.trees.chain", "isojax.trees.fold"]
Words = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Proof = Annotated[str, StringConstraints(pattern=r"^(verify:[a-z][a-z ,-]+|tests/[\w/]+\.py::test_\w+)$")]

ORDERS = {"isojax.trees.chain": trees.chain, "isojax.trees.fold": trees.fold}
"""The functions that documents name; `block` is a fixed order inside one block of fixed shape."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Region(_Part):
    """What a kernel of an op promises.

    Attributes:
        sums: What it adds up, or `nothing`.
        order: In which order, from the inside out.
        adds_in: Dtype of the sums and of the arithmetic.
        rounds_to: Dtype of its results: `compute` is the model's, `inputs` that of what comes in.
        backward: Whether it runs in gradients only.
        blocks: Shapes that decide bits and are no argument of the op.
    """

    sums: Words
    order: list[Order] = []
    adds_in: Literal["float32"] = "float32"
    rounds_to: Literal["float32", "compute", "inputs", "parameter", "int32"]
    backward: bool = False
    blocks: dict[str, int] = {}

    @model_validator(mode="after")
    def _sums_have_an_order(self):
        if (self.sums == "nothing") != (not self.order):
            raise ValueError(f"sums = {self.sums!r} and order = {self.order}: a sum needs an order, nothing needs none")
        return self


class Op(_Part):
    """An op and the phases that run it.

    Attributes:
        computes: The function, in words.
        phases: Where it runs.
        same_as: Another op that evaluates the same function in other phases; numerics are its.
        numerics: Arguments of the op that decide bits.
        probe: Sizes at which the op is traced for its digest.
        regions: The kernels that the op brings, by their names.
    """

    computes: Words
    phases: list[Phase] = Field(min_length=1)
    same_as: str | None = None
    numerics: dict[str, bool | int | str] = {}
    probe: dict[str, int] = {}
    regions: dict[str, Region] = {}

    @model_validator(mode="after")
    def _is_consistent(self):
        if len(set(self.phases)) < len(self.phases):
            raise ValueError(f"phases = {self.phases}: name each once")
        gradients = [name for name, region in self.regions.items() if region.backward]
        if gradients and "trainer_backward" not in self.phases:
            raise ValueError(f"{', '.join(gradients)} run in gradients, but trainer_backward is not in phases")
        if self.same_as and self.numerics:
            raise ValueError(f"numerics are those of {self.same_as}: the same function has them once")
        return self


class Claim(_Part):
    """What is promised over a set of layouts or states.

    Attributes:
        name: Short, for reports.
        promise: In words.
        over: The values of each setting that it covers, e.g. `tensor = [1, 2, 4, 8]`.
        proofs: Pytest nodes, or words in the names of rows of `isojax verify`, that show it.
    """

    name: Words
    promise: Words
    over: dict[str, list[bool | int | str]] = {}
    proofs: list[Proof] = Field(min_length=1)


class Document(_Part):
    """What trainer and engine promise each other.

    Attributes:
        schema_version: Of this form: 1.
        name: As users call it.
        mode: `exact` states orders and makes claims; `native` binds stock operators and claims nothing.
        about: One sentence for `isojax contract show`.
        families: Model families that it covers.
        ops: Every op, by the name it has in `pallas_kernels.binding`.
        claims: What follows.
    """

    schema_version: Literal[1]
    name: Words
    mode: Literal["exact", "native"]
    about: Words
    families: list[Words] = Field(min_length=1)
    ops: dict[str, Op] = Field(min_length=1)
    claims: list[Claim] = []

    @model_validator(mode="after")
    def _is_whole(self):
        problems = []
        owners: dict[str, str] = {}
        for name, op in self.ops.items():
            if op.same_as and (op.same_as not in self.ops or self.ops[op.same_as].same_as):
                problems.append(f"ops.{name}.same_as = {op.same_as!r} is no op with numerics of its own")
            for region in op.regions:
                if owners.setdefault(region, name) != name:
                    problems.append(f"region {region} belongs to {owners[region]} and to {name}: name it under one")
        names = [claim.name for claim in self.claims]
        problems += [f"claim {name} is made twice" for name in sorted({n for n in names if names.count(n) > 1})]
        if self.mode == "native":
            problems += [
                f"native promises no order: drop the regions of {n}" for n, op in self.ops.items() if op.regions
            ]
            problems += [f"native claims nothing: drop {name}" for name in names]
        elif not self.claims:
            problems.append("an exact contract claims something: add [[claims]] with proofs")
        if problems:
            raise ValueError("; ".join(problems))
        return self
