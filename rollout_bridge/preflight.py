"""What our engine does not do, refused all at once before weights load."""

from typing import TYPE_CHECKING

import torch

from isojax.errors import ConfigError, ShardingError
from isojax.layouts import CHUNK
from rollout_bridge import cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PARALLEL = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "decode_context_parallel_size": "context",
}


def refuse_unsupported(config: "VllmConfig") -> None:
    """Checks an engine configuration.

    Raises:
        ShardingError: If only its parallelism is unsupported.
        ConfigError: If anything else is; the message lists every violation.
    """
    sharding, other = _sharding(config), _other(config)
    if other:
        raise ConfigError("; ".join(sharding + other))
    if sharding:
        raise ShardingError("; ".join(sharding))


def _sharding(config: "VllmConfig") -> list[str]:
    return [
        f"{name}={degree}: the engine runs on one device, use {name}=1"
        for name in _PARALLEL
        if (degree := getattr(config.parallel_config, name, 1)) != 1
    ]


def _other(config: "VllmConfig") -> list[str]:
    model, kv = config.model_config, config.cache_config
    found = []

    def check(fits: bool, message: str) -> None:
        if not fits:
            found.append(message)

    check(config.lora_config is None, "LoRA is not supported: merge the adapter into the weights")
    check(config.speculative_config is None, "speculative decoding is not supported: leave it off")
    check(config.kv_transfer_config is None, "KV transfer is not supported: leave kv_transfer_config out")
    check(config.watermark_config is None, "watermarking is not supported: leave it off")
    check(
        kv.cache_dtype in ("auto", *(_name(dtype) for dtype in cache.COMPUTE_DTYPES)),
        f"kv_cache_dtype={kv.cache_dtype} is not supported: K and V are kept in the compute dtype, use 'auto'",
    )
    unit = kv.prefix_match_unit
    check(
        unit is None or unit % CHUNK == 0,
        f"prefix_match_unit={unit} is not a multiple of {CHUNK}: cached prefixes end where chunks do",
    )
    check(
        not kv.user_specified_block_size or kv.block_size % CHUNK == 0,
        f"block_size={kv.block_size} is not a multiple of {CHUNK}: leave it out",
    )
    if model is not None:
        check(
            model.dtype in cache.COMPUTE_DTYPES,
            f"dtype={_name(model.dtype)} is not supported: use bfloat16 or float32",
        )
        check(model.quantization is None, f"quantization={model.quantization} is not supported: use plain weights")
        check(model.runner_type == "generate", f"runner={model.runner_type} is not supported: only generation is")
        check(
            model.logprobs_mode == "processed_logprobs",
            f"logprobs_mode={model.logprobs_mode} is not what tokens are drawn from: use processed_logprobs",
        )
        check(not model.logits_processors, "logits_processors run torch code on logits: leave them out")
        check(not model.enable_prompt_embeds, "enable_prompt_embeds is not supported: prompts are token ids")
        check(not model.return_sampling_mask, "return_sampling_mask is not supported: leave it off")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
