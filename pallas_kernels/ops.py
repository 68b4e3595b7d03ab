"""The ops as plain functions, with their default numerics: for models and losses of your own."""

from pallas_kernels.attention import attention_chunks, attention_decode
from pallas_kernels.cast import cast
from pallas_kernels.causal_conv import causal_conv_chunks, causal_conv_decode
from pallas_kernels.embedding import embed
from pallas_kernels.experts import dispatch_plan, gather_rows, grouped_linear
from pallas_kernels.fork import fork, split
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.gdn import gdn_chunks, gdn_close, gdn_decode, gdn_slots
from pallas_kernels.gdn_gates import gdn_gates
from pallas_kernels.l2_norm import l2_norm
from pallas_kernels.linear import column_linear, row_linear
from pallas_kernels.logprob import logprob, logprobs_all
from pallas_kernels.moe_combine import moe_combine
from pallas_kernels.norm_rope import norm_rope, rotary_tables
from pallas_kernels.output_gate import output_gate
from pallas_kernels.residual_add import residual_add
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.router import load_balancing_loss, router, router_load
from pallas_kernels.rows import row_op, rowwise
from pallas_kernels.sample import sample, sample_key, truncation_mask
from pallas_kernels.segment_sum import segment_sum
from pallas_kernels.swiglu import swiglu, swiglu_fused
from pallas_kernels.tree_sum import sum_tokens, tree_sum

__all__ = [
    "attention_chunks",
    "attention_decode",
    "cast",
    "causal_conv_chunks",
    "causal_conv_decode",
    "column_linear",
    "dispatch_plan",
    "embed",
    "fork",
    "gated_norm",
    "gather_rows",
    "gdn_chunks",
    "gdn_close",
    "gdn_decode",
    "gdn_gates",
    "gdn_slots",
    "grouped_linear",
    "l2_norm",
    "load_balancing_loss",
    "logprob",
    "logprobs_all",
    "moe_combine",
    "norm_rope",
    "output_gate",
    "residual_add",
    "rms_norm",
    "rotary_tables",
    "router",
    "router_load",
    "row_linear",
    "row_op",
    "rowwise",
    "sample",
    "sample_key",
    "segment_sum",
    "split",
    "sum_tokens",
    "swiglu",
    "swiglu_fused",
    "tree_sum",
    "truncation_mask",
]
