"""The Qwen3.5 text model, with experts or dense: one forward for training, scoring, prefill and decode."""

from qwen35_moe.cache import Cache, Placement, init_cache, page_tokens
from qwen35_moe.config import Config
from qwen35_moe.forward import forward, logits, tie
from qwen35_moe.identity import identity
from qwen35_moe.model import Qwen35Moe, init_params, param_shapes, rollout_params
from qwen35_moe.step import Chunks, Decode, Residency, Step, whole_sequences

__all__ = [
    "Cache",
    "Chunks",
    "Config",
    "Decode",
    "Placement",
    "Qwen35Moe",
    "Residency",
    "Step",
    "forward",
    "identity",
    "init_cache",
    "init_params",
    "logits",
    "page_tokens",
    "param_shapes",
    "rollout_params",
    "tie",
    "whole_sequences",
]
