"""Every op of the model under one name: what a contract binds."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels import attention, cast, causal_conv, embedding, experts, fork, gated_norm, gdn, gdn_gates, l2_norm
from pallas_kernels import linear, logprob, moe_combine, norm_rope, output_gate, residual_add, rms_norm, router, swiglu


@dataclasses.dataclass(frozen=True)
class Ops:
    """The executor of each region of the model; signatures as in docs/architecture.md.

    Model code calls ops through this object alone, so that what ran is what the contract bound.
    """

    attention_chunks: Callable[..., Any]
    attention_decode: Callable[..., Any]
    cast: Callable[..., Any]
    causal_conv_chunks: Callable[..., Any]
    causal_conv_decode: Callable[..., Any]
    column_linear: Callable[..., Any]
    embed: Callable[..., Any]
    fork: Callable[..., Any]
    gated_norm: Callable[..., Any]
    gather_rows: Callable[..., Any]
    gdn_chunks: Callable[..., Any]
    gdn_close: Callable[..., Any]
    gdn_decode: Callable[..., Any]
    gdn_gates: Callable[..., Any]
    gdn_slots: Callable[..., Any]
    grouped_linear: Callable[..., Any]
    l2_norm: Callable[..., Any]
    logprob: Callable[..., Any]
    moe_combine: Callable[..., Any]
    norm_rope: Callable[..., Any]
    output_gate: Callable[..., Any]
    residual_add: Callable[..., Any]
    rms_norm: Callable[..., Any]
    router: Callable[..., Any]
    row_linear: Callable[..., Any]
    split: Callable[..., Any]
    swiglu: Callable[..., Any]
    swiglu_fused: Callable[..., Any]

    def replace(self, **ops: Callable[..., Any]) -> "Ops":
        """These ops with some exchanged: for experiments and negative controls."""
        return dataclasses.replace(self, **ops)
