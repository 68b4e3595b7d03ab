"""One forward for training, scoring, prefill and decode."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.binding import Ops
from qwen35_moe.attention import attention_mixer
from qwen35_moe.cache import Cache
from qwen35_moe.config import PERIOD, Config, is_attention
from qwen35_moe.context import Context
from qwen35_moe.deltanet import deltanet_mixer
from qwen35_moe.mlp import mlp
from qwen35_moe.state import LayerState
from qwen35_moe.step import Residency, Step

type Params = Mapping[str, Any]


def forward(
    params: Params,
    step: Step,
    config: Config,
    ops: Ops,
    *,
    cache: Cache | None = None,
    decode_at: Residency | None = None,
    chunks_at: Residency | None = None,
    max_positions: int = 32_768,
    remat: bool = False,
) -> tuple[Float[Array, "rows embed"], Cache | None, Any]:
    """The hidden state after the final norm of every row of a step.

    The same function trains, scores, prefills and decodes; only the step and the cache differ. Without a cache all
    sequences start at their first token and layers run as a scan over periods; with one they run in order,
    each on its own pools.

    Args:
        params: The nested dict of docs/architecture.md; matrices float32 or already in the compute dtype.
        step: Tokens on the grid.
        config: The model's sizes.
        ops: The bound ops.
        cache: Pages and slots, or None.
        decode_at: Where the sequences of the decode rows live.
        chunks_at: Where the chunk sequences live.
        max_positions: Length of the rotary tables; above every position.
        remat: Whether the backward recomputes each period from its input.

    Returns:
        Hidden rows, the cache after the step, and the routers' logits and choices of all layers (None when dense).
    """
    context = Context.of(step, config, max_positions, decode_at, chunks_at)
    x = ops.embed(step.tokens, params["embed_tokens"], dtype=config.compute_dtype, segments=context.segments)
    if cache is None:
        x, routed = _uncached_layers(params["layers"], x, context, remat, config, ops)
    else:
        x, cache, routed = _cached_layers(params["layers"], x, context, cache, config, ops)
    hidden = ops.rms_norm(x, params["norm"], eps=config.rms_norm_eps, segments=context.segments)
    return hidden, cache, routed


def logits(
    params: Params, hidden: Float[Array, "rows embed"], config: Config, ops: Ops, *, segments=None
) -> Float32[Array, "rows vocab"]:
    """Scores of the whole (padded) vocabulary for hidden rows, float32 and not rounded."""
    del config
    (scores,) = ops.column_linear(hidden, (params["lm_head"],), out_dtypes=(jnp.float32,), segments=segments)
    return scores


def tie(params: Params, config: Config, ops: Ops) -> Params:
    """`params` with an `lm_head`: of a tied model the embedding, whose two gradients are added in order by `fork`."""
    if not config.tie_word_embeddings:
        return params
    table, head = ops.fork(params["embed_tokens"], 2)
    return {**params, "embed_tokens": table, "lm_head": head}


def _layer(
    layer: int, weights: Params, x, context: Context, state: Any, config: Config, ops: Ops
) -> tuple[Any, Any, Any]:
    """One decoder layer; `layer` counts inside its period, whose last layer is the one of attention."""
    norm = functools.partial(ops.rms_norm, eps=config.rms_norm_eps, segments=context.segments)
    mixer = attention_mixer if is_attention(layer) else deltanet_mixer
    skip, x = ops.fork(x, 2)
    with jax.named_scope(mixer.__name__):
        mixed, state = mixer(weights["mixer"], norm(x, weights["input_norm"]), context, state, config, ops)
    skip, x = ops.fork(ops.residual_add(skip, mixed), 2)
    with jax.named_scope("mlp"):
        out, routed = mlp(weights["mlp"], norm(x, weights["post_norm"]), context, config, ops)
    return ops.residual_add(skip, out), state, routed


def _uncached_layers(layers: Params, x, context: Context, remat: bool, config: Config, ops: Ops):
    def period(x, weights):
        routed = []
        for layer in range(PERIOD):
            x, _, route = _layer(layer, weights[str(layer)], x, context, None, config, ops)
            routed.append(route)
        return x, routed if config.is_moe else None

    return lax.scan(jax.checkpoint(period) if remat else period, x, dict(layers))


def _cached_layers(layers: Params, x, context: Context, cache: Cache, config: Config, ops: Ops):
    pools, slots, routed = list(cache.pools), list(cache.slots), []
    state_layers, kv_layers = enumerate(cache.placement.state), iter(cache.placement.kv)
    for index in range(config.num_hidden_layers):
        period, layer = divmod(index, PERIOD)
        weights = jax.tree.map(lambda w, p=period: w[p], layers[str(layer)])
        if is_attention(layer):
            pool = next(kv_layers)
            x, pools[pool], route = _layer(layer, weights, x, context, pools[pool], config, ops)
        else:
            number, (pool, group) = next(state_layers)
            state = LayerState(pools[pool], slots[number], group)
            x, state, route = _layer(layer, weights, x, context, state, config, ops)
            pools[pool], slots[number] = state.pool, state.slots
        routed.append(route)
    return x, Cache(tuple(pools), tuple(slots), cache.placement), routed if config.is_moe else None
