"""vLLM's view of the device: our worker, no torch kernels, pages as the model wants them."""

import sys
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from isojax.errors import ConfigError, SamplingError
from isojax.layouts import CHUNK
from rollout_bridge import memory, set_environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class JaxPlatform(Platform):
    """JAX computes; torch stays on the CPU for vLLM's own bookkeeping."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"  # vLLM makes torch.device(f"{device_name}:0") of it.
    device_type = "cpu"
    dispatch_key = "CPU"
    ray_device_key = ""
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    simple_compile_backend = "eager"
    dist_backend = "gloo"
    supported_quantization: list[str] = []  # noqa: RUF012 vLLM declares it so
    additional_env_vars = ["XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR"]  # noqa: RUF012

    def is_cpu(self) -> bool:
        # Cleaning up, vLLM asks whether torch has a device cache to empty. It has none, and must not open a device.
        return sys._getframe(1).f_code.co_name == "cleanup_dist_env_and_memory"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return memory.device_name()

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return memory.total_bytes()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def inference_mode(cls):
        return torch.no_grad()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        pass

    @classmethod
    def import_kernels(cls) -> None:
        pass

    @classmethod
    def import_ir_kernels(cls) -> None:
        pass

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        pass  # preflight refuses dtypes together with everything else.

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        return "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"  # A name; nothing of it runs.

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        from rollout_bridge.preflight import refuse_unsupported

        refuse_unsupported(vllm_config)
        parallel = vllm_config.parallel_config
        parallel.worker_cls = "rollout_bridge.worker.JaxWorker"
        parallel.distributed_executor_backend = "uni"
        parallel.disable_custom_all_reduce = True
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        scheduling = vllm_config.scheduler_config
        name = "BoundAsyncScheduler" if scheduling.async_scheduling else "BoundScheduler"
        scheduling.scheduler_cls = f"rollout_bridge.scheduler.{name}"

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: "VllmConfig") -> None:
        """Sets the page length: the least multiple of 64 tokens whose attention page holds a state page."""
        import qwen35_moe
        from rollout_bridge.cache import config_of, token_bytes

        config, kv = config_of(vllm_config.model_config), vllm_config.cache_config
        least = qwen35_moe.page_tokens(config)
        if kv.user_specified_block_size and kv.block_size < least:
            raise ConfigError(
                f"block_size={kv.block_size} cannot hold a state page: leave it out, or use {least} or more"
            )
        if not kv.user_specified_block_size:
            kv.block_size = least
        unit = kv.prefix_match_unit
        if unit is not None and kv.block_size % unit:
            units = [n * CHUNK for n in range(1, kv.block_size // CHUNK + 1) if kv.block_size % (n * CHUNK) == 0]
            raise ConfigError(
                f"prefix_match_unit={unit} does not divide a page of {kv.block_size} tokens: use one of {units}"
            )
        if kv.mamba_cache_mode == "align":
            kv.mamba_block_size = kv.block_size
        kv.mamba_page_size_padded = kv.block_size * token_bytes(config)

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        from vllm.exceptions import VLLMValidationError

        from rollout_bridge.sampling import refuse_unsupported

        try:
            refuse_unsupported(params)
        except SamplingError as error:
            raise VLLMValidationError(str(error)) from error  # The server answers it with status 400.


def use() -> None:
    """Makes ours the platform of this process, also where vLLM was imported, and chose one, before."""
    set_environment()
    import vllm.platforms

    chosen = vars(vllm.platforms).get("_current_platform")
    if chosen is None or isinstance(chosen, JaxPlatform):
        return
    ours = JaxPlatform()
    vllm.platforms._current_platform = ours
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("current_platform") is chosen:
            vars(module)["current_platform"] = ours
