"""The Gated DeltaNet mixer: convolution, gates, the delta rule in 64-token chunks, gated norm."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from isojax.layouts import CHUNK
from pallas_kernels.binding import Ops
from qwen35_moe.cache import Slots, state_shape
from qwen35_moe.config import Config
from qwen35_moe.context import Context
from qwen35_moe.state import LayerState

type Weights = dict[str, Array]


def deltanet_mixer(
    weights: Weights,
    x: Float[Array, "rows embed"],
    context: Context,
    state: LayerState | None,
    config: Config,
    ops: Ops,
) -> tuple[Float[Array, "rows embed"], LayerState | None]:
    """Gated DeltaNet over a step's rows (docs/model.md, docs/gated_deltanet.md).

    Args:
        weights: The layer's projections, `conv`, `A_log`, `dt_bias`, `norm`, `out_proj`.
        x: Normalised rows.
        context: The step and its residency.
        state: The layer's pool, slots and group, or None: then all sequences start from nothing.
        config: The model's sizes.
        ops: The bound ops.

    Returns:
        The mixer's output, and the layer's state after the step.
    """
    step, segments, split = context.step, context.segments, context.step.decode_rows
    qkv, z, b, a = ops.column_linear(
        x,
        (weights["in_proj_qkv"], weights["in_proj_z"], weights["in_proj_b"], weights["in_proj_a"]),
        segments=segments,
    )
    g, beta = ops.gdn_gates(a, b, weights["A_log"], weights["dt_bias"], segments=segments)
    out = []
    if step.decode is not None:
        rows = (qkv[:split], g[:split], beta[:split])
        o, state = _decode(weights, rows, context, state, config, ops)
        out.append(o)
    if step.chunks is not None:
        rows = (qkv[split:], g[split:], beta[split:]) if split else (qkv, g, beta)
        o, state = _chunks(weights, rows, context, state, config, ops)
        out.append(o)
    o = jnp.concatenate(out) if len(out) > 1 else out[0]
    z = z.reshape(o.shape)
    normed = ops.gated_norm(o, z, weights["norm"], eps=config.rms_norm_eps, segments=segments)
    return ops.row_linear(normed.reshape(x.shape[0], -1), weights["out_proj"], segments=segments), state


def _chunks(weights: Weights, rows, context: Context, state: LayerState | None, config: Config, ops: Ops):
    chunks = context.step.chunks
    qkv, g, beta = (y.reshape(-1, CHUNK, y.shape[-1]) for y in rows)
    if state is None:
        recurrent = jnp.zeros((chunks.num_sequences, *state_shape(config)), jnp.float32)
        window = delta = None
    else:
        recurrent, window, delta = state.enter(context.chunks_at, config)
    y, window = ops.causal_conv_chunks(qkv, window, weights["conv"], chunks, segments=context.segments)
    heads = _heads(y.reshape(-1, y.shape[-1]), config, ops)
    q, k, v = (t.reshape(-1, CHUNK, *t.shape[1:]) for t in heads)
    o, recurrent, delta = ops.gdn_chunks(q, k, v, g, beta, chunks, recurrent, delta)
    if state is not None:
        state = state.leave(context.chunks_at, recurrent, window, delta)
    return o.reshape(-1, *o.shape[2:]), state


def _decode(weights: Weights, rows, context: Context, state: LayerState, config: Config, ops: Ops):
    slot = context.decode_at.slot
    qkv, g, beta = rows
    y, window = ops.causal_conv_decode(qkv, state.slots.window.at[slot].get(mode="clip"), weights["conv"])
    q, k, v = _heads(y, config, ops)
    o, delta = ops.gdn_decode(q, k, v, g, beta, context.step.decode, state.slots.delta, slot)
    slots = Slots(delta, state.slots.window.at[slot].set(window, mode="drop"))
    state = dataclasses.replace(state, slots=slots).after_decode(window, context, config, ops)
    return o, state


def _heads(y: Float[Array, "rows channels"], config: Config, ops: Ops):
    """Queries, keys (both normalised) and values of the convolution's output."""
    sizes = (config.linear_key_dim, config.linear_key_dim, config.linear_value_dim)
    q, k, v = ops.split(y, sizes, -1)
    rows, dk = y.shape[0], config.linear_key_head_dim
    q = ops.l2_norm(q.reshape(rows, -1, dk), scale=dk**-0.5)
    k = ops.l2_norm(k.reshape(rows, -1, dk), scale=1.0)
    return q, k, v.reshape(rows, -1, config.linear_value_head_dim)
