"""The tiny reference model, by a seeded procedure without a framework's generator, and a dense sibling."""

import functools
from pathlib import Path

import numpy as np

from isojax.rl.tokenizer import PADDED_VOCAB, byte_tokenizer
from qwen35_moe.checkpoint import Params, export, seeded_params, seeded_tensors
from qwen35_moe.config import ComputeDtype, Config

_SIZES = {
    **{"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 64, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32},
    **{"linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02, "max_position_embeddings": 4096},
    **{"attention_bias": False, "attention_dropout": 0.0, "full_attention_interval": 4},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        **{"mrope_interleaved": True, "mrope_section": [3, 3, 2]},
    },
    **{"eos_token_id": 0, "pad_token_id": None, "bos_token_id": None},
}

MOE = {
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    **_SIZES,
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    **{"tie_word_embeddings": False, "router_aux_loss_coef": 0.001, "output_router_logits": False},
}

DENSE = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    **_SIZES,
    **{"intermediate_size": 192, "tie_word_embeddings": True},
}

WEIGHTS_SHA256 = "39340279a131dbd126d515c76b2d5c14c7699be0f455a6a99f2a4ef893a46b29"


def config(compute_dtype: ComputeDtype = "float32") -> Config:
    return Config.from_hf(MOE, compute_dtype=compute_dtype)


def dense_config(compute_dtype: ComputeDtype = "float32") -> Config:
    return Config.from_hf(DENSE, compute_dtype=compute_dtype)


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    """Float32, by the name that transformers has in memory."""
    return seeded_tensors(config())


@functools.cache
def params() -> Params:
    return seeded_params(config())


@functools.cache
def dense_params() -> Params:
    return seeded_params(dense_config())


def tokens() -> np.ndarray:
    """int64 [2, 72], chosen so that float32 noise flips no expert (top-2 to top-3 gap 2.9e-4)."""
    return np.random.RandomState(193).randint(0, 512, (2, 72))


def write_checkpoint(folder: Path, *, periods: int = 1, hidden: int = 64) -> Config:
    """A small model with experts and the byte tokenizer, as a Hugging Face folder: one period, 64 wide by default."""
    small = Config(
        **{"vocab_size": PADDED_VOCAB, "hidden_size": hidden, "num_hidden_layers": 4 * periods},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 10_000_000.0},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
        **{"num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    )
    export(folder, seeded_params(small), small, tokenizer=byte_tokenizer())
    return small
