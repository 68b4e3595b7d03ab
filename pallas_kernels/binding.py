"""Every op of the model under one name: what a contract binds."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from isojax.contract import Contract, load
from pallas_kernels import (
    attention,
    causal_conv,
    experts,
    gdn,
    linear,
    logprob,
    tree_sum,
)
from pallas_kernels import cast as cast_op
from pallas_kernels import embedding as embed_op
from pallas_kernels import fork as fork_op
from pallas_kernels import gated_norm as gated_norm_op
from pallas_kernels import gdn_gates as gdn_gates_op
from pallas_kernels import l2_norm as l2_norm_op
from pallas_kernels import moe_combine as moe_combine_op
from pallas_kernels import norm_rope as norm_rope_op
from pallas_kernels import output_gate as output_gate_op
from pallas_kernels import residual_add as residual_add_op
from pallas_kernels import rms_norm as rms_norm_op
from pallas_kernels import router as router_op
from pallas_kernels import sample as sample_op
from pallas_kernels import swiglu as swiglu_op

type Op = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Ops:
    """The executor of each region of the model; signatures as in docs/architecture.md.

    Model code calls ops through this object alone, so that what ran is what the contract bound.

    Attributes:
        contract: What bound them; None for ops put together by hand, which keep no contract.
        bound: The ops that it bound.
    """

    attention_chunks: Op
    attention_decode: Op
    cast: Op
    causal_conv_chunks: Op
    causal_conv_decode: Op
    column_linear: Op
    embed: Op
    fork: Op
    gated_norm: Op
    gather_rows: Op
    gdn_chunks: Op
    gdn_close: Op
    gdn_decode: Op
    gdn_gates: Op
    gdn_slots: Op
    grouped_linear: Op
    l2_norm: Op
    logprob: Op
    logprobs_all: Op
    moe_combine: Op
    norm_rope: Op
    output_gate: Op
    residual_add: Op
    rms_norm: Op
    router: Op
    row_linear: Op
    split: Op
    sum_tokens: Op
    swiglu: Op
    swiglu_fused: Op
    truncation_mask: Op
    contract: Contract | None = dataclasses.field(default=None, compare=False, repr=False)
    bound: Mapping[str, Op] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def replace(self, **ops: Op) -> "Ops":
        """These ops with some exchanged: for experiments and negative controls. Peers will refuse them by name."""
        return dataclasses.replace(self, **ops)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The ops that are not those of the contract, however they came here."""
        return tuple(name for name, op in self.bound.items() if getattr(self, name) is not op)


# For every op the module that has it; its native twin stands in the module's `stock`.
_MODULES = {
    "attention_chunks": attention,
    "attention_decode": attention,
    "cast": cast_op,
    "causal_conv_chunks": causal_conv,
    "causal_conv_decode": causal_conv,
    "column_linear": linear,
    "embed": embed_op,
    "fork": fork_op,
    "gated_norm": gated_norm_op,
    "gather_rows": experts,
    "gdn_chunks": gdn,
    "gdn_close": gdn,
    "gdn_decode": gdn,
    "gdn_gates": gdn_gates_op,
    "gdn_slots": gdn,
    "grouped_linear": experts,
    "l2_norm": l2_norm_op,
    "logprob": logprob,
    "logprobs_all": logprob,
    "moe_combine": moe_combine_op,
    "norm_rope": norm_rope_op,
    "output_gate": output_gate_op,
    "residual_add": residual_add_op,
    "rms_norm": rms_norm_op,
    "router": router_op,
    "row_linear": linear,
    "split": fork_op,
    "sum_tokens": tree_sum,
    "swiglu": swiglu_op,
    "swiglu_fused": swiglu_op,
    "truncation_mask": sample_op,
}

# Data movement and allocation: nothing in them decides a bit.
_WITHOUT_SUMS = ("split", "gdn_slots")


def bind(contract: Contract | str) -> Ops:
    """The ops that a contract names, with the numerics it gives them: one object for equal contracts.

    Args:
        contract: A contract, or the name of one that isojax ships: `"exact"`, `"native"`.

    Raises:
        ContractError: If there is no such contract, or it says nothing about an op.
    """
    contract = load(contract) if isinstance(contract, str) else contract
    digest = contract.digest
    if digest not in _BOUND:
        ops = {name: _bind(name, module, contract) for name, module in _MODULES.items()}
        _BOUND[digest] = Ops(**ops, contract=contract, bound=ops)
    return _BOUND[digest]


_BOUND: dict[str, Ops] = {}  # By the digest of the contract's document.


def _bind(name: str, module: ModuleType, contract: Contract) -> Op:
    native = contract.document.mode == "native"
    return getattr(_stock(module), name) if native else _with_numerics(name, module, contract)


def _stock(module: ModuleType) -> ModuleType:
    return importlib.import_module(f"{module.__name__}.stock")


def _with_numerics(name: str, module: ModuleType, contract: Contract) -> Op:
    op = getattr(module, name)
    if name in _WITHOUT_SUMS:
        return op
    numerics = contract.numerics(name, contract.op(name).phases[0])
    return functools.partial(op, numerics=module.Numerics(**numerics)) if numerics else op
