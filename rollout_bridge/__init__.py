"""The real vLLM engine over our model: platform plugin, worker, `LLM`, `tokens_and_logprobs`.

Installing this package changes nothing for other uses of vLLM: the plugin is inert unless
`ISOJAX_VLLM=1`, which `LLM` and `isojax serve` set for themselves.
"""

import importlib
import os

_EXPORTS = {"LLM": "llm", "tokens_and_logprobs": "outputs"}

ARCHITECTURES = (
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)


def register_platform() -> str | None:
    """vLLM's `platform_plugins` hook: our platform when it was asked for, else None. Imports nothing."""
    if os.environ.get("ISOJAX_VLLM") != "1":
        return None
    set_environment()
    return "rollout_bridge.platform.JaxPlatform"


def register_models() -> None:
    """vLLM's `general_plugins` hook: architectures that our worker runs. Called in every process, repeatedly."""
    if os.environ.get("ISOJAX_VLLM") != "1":
        return
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"rollout_bridge.stub:{architecture}")


def set_environment() -> None:
    """Turns the plugin on in this process and those it starts."""
    os.environ["ISOJAX_VLLM"] = "1"
    # The worker speaks the protocol in which resumed requests are sent again as new ones; vLLM's default
    # depends on whether Triton is there. A process that runs JAX must not be forked.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"rollout_bridge.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'rollout_bridge' has no attribute {name!r}")
