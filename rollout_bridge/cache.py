"""How the model's cache lies under vLLM's block manager: layer specs, page sizes, placement of layers.

A page of an attention layer is K and V of `page_tokens` tokens; a page of a Gated DeltaNet layer is the
float32 state of the last closed chunk and the convolution window. Pages are equally large, so one pool of
pages serves all layer groups; a block id belongs to one group at a time.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import torch

from isojax.errors import IsojaxError
from pallas_kernels.binding import Ops
from qwen35_moe.cache import Placement, init_cache
from qwen35_moe.config import CONV_TAPS, PERIOD, Config, layer_type

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

COMPUTE_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def config_of(model_config: "ModelConfig") -> Config:
    """The model's sizes, as vLLM read them from the checkpoint, computed in vLLM's `dtype`."""
    return Config.from_hf(model_config.hf_config.to_dict(), compute_dtype=COMPUTE_DTYPES[model_config.dtype])


def state_shapes(config: Config) -> tuple[tuple[int, ...], ...]:
    """Shapes of what a Gated DeltaNet layer keeps in a page: the float32 state, the convolution window."""
    state = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return state, (CONV_TAPS - 1, config.conv_dim)


def token_bytes(config: Config) -> int:
    """Bytes of K and V of one token in one attention layer."""
    return 2 * config.kv_dim * jnp.dtype(config.compute_dtype).itemsize


def layer_name(layer: int) -> str:
    return f"layers.{layer}.{layer_type(layer)}"


def specs(config: Config, vllm_config: "VllmConfig") -> "dict[str, KVCacheSpec]":
    """vLLM's description of the cache of every layer."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    cache, dtype = vllm_config.cache_config, vllm_config.model_config.dtype
    attention = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        dtype=dtype,
    )
    state = MambaSpec(
        block_size=cache.mamba_block_size,
        shapes=state_shapes(config),
        dtypes=(torch.float32, dtype),
        page_size_padded=cache.block_size * token_bytes(config),
        mamba_cache_mode=cache.mamba_cache_mode,
    )
    return {
        layer_name(i): attention if layer_type(i) == "full_attention" else state
        for i in range(config.num_hidden_layers)
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where layers lie, as vLLM decided.

    Attributes:
        num_blocks: Pages of one pool.
        page_tokens: Tokens of an attention page.
        state_block: Tokens after which the state moves to a new page.
        attention_group: Index of the attention group among vLLM's groups.
        state_groups: Indices of the Gated DeltaNet groups among vLLM's groups.
        placement: Pool and state group of every layer, as the model takes it.
    """

    num_blocks: int
    page_tokens: int
    state_block: int
    attention_group: int
    state_groups: tuple[int, ...]
    placement: Placement

    @classmethod
    def least(cls, config: Config, page_tokens: int) -> "Layout":
        """A layout of as few pages as can be: for planning."""
        groups = tuple(range(1, PERIOD))
        return cls(2, page_tokens, page_tokens, 0, groups, Placement.by_period(config))

    @classmethod
    def of(cls, config: Config, kv_cache: "KVCacheConfig") -> "Layout":
        """Reads vLLM's grouping.

        Raises:
            IsojaxError: If pages differ in size, or attention layers lie in several groups.
        """
        groups = kv_cache.kv_cache_groups
        sizes = {group.kv_cache_spec.page_size_bytes for group in groups}
        attention = [i for i, group in enumerate(groups) if group.layer_names[0].endswith("full_attention")]
        states = [i for i in range(len(groups)) if i not in attention]
        if len(sizes) != 1 or len(attention) != 1 or not states:
            raise IsojaxError(
                f"the cache needs one attention group, and pages of one size, got {len(attention)} attention groups"
                f" and page sizes {sorted(sizes)}: report this with the model's config.json"
            )
        pool_of = {name: pool for group in groups for pool, name in enumerate(group.layer_names)}
        group_of = {name: number for number, i in enumerate(states) for name in groups[i].layer_names}
        names = [layer_name(i) for i in range(config.num_hidden_layers)]
        return cls(
            num_blocks=kv_cache.num_blocks,
            page_tokens=groups[attention[0]].kv_cache_spec.block_size,
            state_block=groups[states[0]].kv_cache_spec.block_size,
            attention_group=attention[0],
            state_groups=tuple(states),
            placement=Placement(
                state=tuple((pool_of[name], group_of[name]) for name in names if name in group_of),
                kv=tuple(pool_of[name] for name in names if name not in group_of),
            ),
        )


def slot_bytes(config: Config, ops: Ops, page_tokens: int, num_slots: int) -> int:
    """Bytes of all slots: what running requests hold beside their pages."""
    cache = jax.eval_shape(
        lambda: init_cache(
            config, Placement.by_period(config), ops, num_blocks=1, num_slots=num_slots, tokens=page_tokens
        )
    )
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.slots))
