"""How each op of a contract is traced for its digest: its function and arguments of a few sizes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isojax.contract import Probe
from isojax.layouts import CHUNK, Segments
from isojax.optim import AdamW, AdamWState, global_norm
from pallas_kernels.binding import Ops
from pallas_kernels.experts import Plan, dispatch_plan
from pallas_kernels.router import load_balancing_loss
from pallas_kernels.rows import row_op
from pallas_kernels.sample import edit_logits, sample
from pallas_kernels.segment_sum import segment_sum
from pallas_kernels.step import Chunks, Decode
from pallas_kernels.tree_sum import add_gradients, tree_sum

type Sizes = Mapping[str, int]


def probes(o: Ops) -> dict[str, Probe]:
    """A probe for every op of the contract that bound `o`, with the numerics it gave them.

    Arguments are written by their axes, whose sizes the contract names: `rows width` is an array in the compute
    dtype, `int32: rows` one in its own; `segments`, `chunks`, `decode`, `slots`, `plan` and `pairs` are what ops
    take under these names.
    """
    table = {
        # Rows and casts.
        "cast": (lambda x: o.cast(x, jnp.bfloat16), "float32: rows width"),
        "embed": (_segmented(o.embed, dtype=jnp.bfloat16), "int32: rows, float32: words width, segments"),
        "fork": (lambda x: o.fork(x, 3), "rows width"),
        "residual_add": (o.residual_add, "rows width, rows width"),
        "rms_norm": (_segmented(o.rms_norm), "rows width, float32: width, segments"),
        "segment_sum": (segment_sum, "float32: blocks width, segments"),
        # Products.
        "column_linear": (
            _segmented(lambda x, *weights, segments: o.column_linear(x, weights, segments=segments)),
            "rows inputs, float32: outputs inputs, float32: outputs inputs, segments",
        ),
        "row_linear": (_segmented(o.row_linear), "rows inputs, float32: outputs inputs, segments"),
        "swiglu": (o.swiglu, "rows width, rows width"),
        "swiglu_fused": (o.swiglu_fused, "rows width"),
        # Attention.
        "norm_rope": (
            _segmented(o.norm_rope),
            "rows heads head_dim, float32: head_dim, float32: rows half, float32: rows half, segments",
        ),
        "attention_chunks": (
            o.attention_chunks,
            "blocks 64 heads head_dim, pages 2 kv_heads page_tokens head_dim, int32: sequences pages, chunks",
        ),
        "attention_decode": (
            o.attention_decode,
            "rows heads head_dim, pages 2 kv_heads page_tokens head_dim, int32: rows pages, decode",
        ),
        "output_gate": (o.output_gate, "rows width, rows width"),
        # Gated DeltaNet.
        "causal_conv_chunks": (
            o.causal_conv_chunks,
            "blocks 64 channels, sequences 3 channels, float32: channels 4, chunks",
        ),
        "causal_conv_decode": (o.causal_conv_decode, "rows channels, rows 3 channels, float32: channels 4"),
        "gdn_gates": (
            _segmented(o.gdn_gates),
            "rows heads, rows heads, float32: heads, float32: heads, segments",
        ),
        "l2_norm": (functools.partial(o.l2_norm, scale=0.125), "rows heads head_dim"),
        "gdn_chunks": (
            o.gdn_chunks,
            "blocks 64 key_heads key_dim, blocks 64 key_heads key_dim, blocks 64 heads value_dim,"
            "float32: blocks 64 heads, float32: blocks 64 heads, chunks, float32: sequences heads key_dim value_dim",
        ),
        "gdn_decode": (
            o.gdn_decode,
            "rows key_heads key_dim, rows key_heads key_dim, rows heads value_dim,"
            "float32: rows heads, float32: rows heads, decode, slots, int32: rows",
        ),
        "gdn_close": (o.gdn_close, "decode, slots, int32: rows, float32: rows heads key_dim value_dim"),
        "gated_norm": (
            _segmented(o.gated_norm),
            "rows heads head_dim, rows heads head_dim, float32: head_dim, segments",
        ),
        # Experts.
        "router": (functools.partial(o.router, top_k=2), "float32: rows experts, bool: rows"),
        "gather_rows": (
            lambda x, experts, segments: o.gather_rows(x, dispatch_plan(experts, 4, segments)),
            "rows width, int32: rows top_k, segments",
        ),
        "grouped_linear": (o.grouped_linear, "pairs inputs, float32: experts outputs inputs, plan"),
        "moe_combine": (o.moe_combine, "pairs width, float32: rows top_k, plan, rows width, rows 1"),
        "load_balancing_loss": (
            functools.partial(load_balancing_loss, top_k=2),
            "float32: rows experts, bool: rows, int32: experts",
        ),
        # Scores, samples and updates.
        "logprob": (
            lambda logits, targets, t, keep: o.logprob(logits, targets, temperature=t, keep=keep),
            "float32: rows vocab, int32: rows, float32: rows, bool: rows vocab",
        ),
        "logprobs_all": (lambda logits, t: o.logprobs_all(logits, temperature=t), "float32: rows vocab, float32: rows"),
        "sample": (sample, "float32: rows vocab, uint32: rows 2, float32: rows, bool: rows vocab"),
        "edit_logits": (edit_logits, "float32: rows vocab, int32: rows edits, float32: rows edits, bool: rows"),
        "truncation_mask": (
            lambda logits, t, k, p, m: o.truncation_mask(logits, temperature=t, top_k=k, top_p=p, min_p=m),
            "float32: rows vocab, float32: rows, int32: rows, float32: rows, float32: rows",
        ),
        "token_loss": (row_op("loss", lambda score, weight: score * weight), "float32: rows, float32: rows"),
        "sum_tokens": (o.sum_tokens, "float32: rows, segments"),
        "tree_sum": (tree_sum, "float32: parts width"),
        "add_gradients": (add_gradients, "float32: rows width, float32: rows width"),
        "global_norm": (lambda a, b: global_norm({"a": a, "b": b}), "float32: rows width, float32: width"),
        "adamw": (_adamw, "int32:, float32: rows width, float32: rows width, float32: rows width, float32: rows width"),
    }
    return {name: Probe(fn, functools.partial(_arguments, o, text)) for name, (fn, text) in table.items()}


def _segmented(op: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return lambda *args: op(*args[:-1], segments=args[-1], **settings)


def _adamw(count, param, mu, nu, grad):
    optimizer = AdamW(lambda step: 1e-3 / (1.0 + step), weight_decay=0.1, max_grad_norm=1.0)
    return optimizer.update({"w": param}, {"w": grad}, AdamWState(count, {"w": mu}, {"w": nu}))


def _arguments(o: Ops, text: str, sizes: Sizes, dtype: np.dtype) -> tuple[Any, ...]:
    return tuple(_argument(o, word.strip(), sizes, dtype) for word in text.split(","))


def _argument(o: Ops, text: str, sizes: Sizes, dtype: np.dtype) -> Any:
    if text in _STRUCTURES:
        return jax.eval_shape(functools.partial(_STRUCTURES[text], o, sizes, dtype))
    kind, typed, axes = text.rpartition(":")
    shape = [int(axis) if axis.isdigit() else _size(axis, sizes) for axis in axes.split()]
    return jax.ShapeDtypeStruct(shape, kind if typed else dtype)


def _size(axis: str, sizes: Sizes) -> int:
    return len(jax.eval_shape(lambda: _plan(sizes)).row) if axis == "pairs" else sizes[axis]


def _segments(sizes: Sizes) -> Segments:
    blocks = sizes["blocks"] if "blocks" in sizes else sizes["rows"] // CHUNK
    return Segments(jnp.zeros(blocks, jnp.int32), sizes["sequences"])


def _chunks(sizes: Sizes) -> Chunks:
    return Chunks(*[jnp.zeros(sizes["blocks"], jnp.int32)] * 4, num_sequences=sizes["sequences"])


def _plan(sizes: Sizes) -> Plan:
    experts = jnp.zeros((sizes["rows"], sizes["top_k"]), jnp.int32)
    return dispatch_plan(experts, sizes["experts"], _segments(sizes))


def _slots(o: Ops, sizes: Sizes, dtype: np.dtype) -> Any:
    return o.gdn_slots(*(sizes[name] for name in ("slots", "key_heads", "heads", "key_dim", "value_dim")), dtype)


_STRUCTURES: dict[str, Callable[..., Any]] = {
    "segments": lambda o, sizes, dtype: _segments(sizes),
    "chunks": lambda o, sizes, dtype: _chunks(sizes),
    "decode": lambda o, sizes, dtype: Decode(jnp.zeros(sizes["rows"], jnp.int32), jnp.zeros(sizes["rows"], bool)),
    "plan": lambda o, sizes, dtype: _plan(sizes),
    "slots": _slots,
}
