"""What vLLM's registry inspects of our architectures. Never instantiated: the worker runs `qwen35_moe`."""

import torch
from torch import nn


class Qwen3_5ForCausalLM(nn.Module):
    """A hybrid language model with recurrent state, in vLLM's protocols `IsHybrid` and `HasInnerState`."""

    has_inner_state = True
    is_hybrid = True
    # Not so: but vLLM's own refusals come one at a time, and preflight names all violations at once.
    supports_lora = supports_pp = True
    packed_modules_mapping: dict[str, list[str]] = {}  # noqa: RUF012 vLLM declares it so
    embedding_modules: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, vllm_config=None, prefix: str = ""):
        super().__init__()
        raise TypeError("this class describes a model to vLLM's registry; rollout_bridge.worker runs the model itself")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None): ...

    def compute_logits(self, hidden_states): ...

    def make_empty_intermediate_tensors(self, batch_size, dtype, device): ...

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config) -> tuple[tuple[int, ...], ...]:
        from rollout_bridge.cache import config_of, state_shapes

        return state_shapes(config_of(vllm_config.model_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config) -> tuple[torch.dtype, ...]:
        return (torch.float32, vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_copy_func(cls): ...


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    pass


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """A multimodal checkpoint, used for its text alone."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForCausalLM):
    """A multimodal checkpoint, used for its text alone."""
