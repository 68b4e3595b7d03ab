"""How much memory there is, asked without opening the device: vLLM asks in processes that must not take it."""

import contextlib
import os

_CPU_SHARE, _CPU_MOST = 0.25, 8 << 30


def device_name() -> str:
    """The GPU's name, or "cpu"."""
    return _gpu()[0] if _gpu() else "cpu"


def total_bytes() -> int:
    """Bytes of the GPU's memory; on the CPU a quarter of the machine's, at most 8 GiB."""
    if gpu := _gpu():
        return gpu[1]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(machine * _CPU_SHARE), _CPU_MOST)


def is_gpu() -> bool:
    """Whether the device has memory of its own to plan with."""
    return _gpu() is not None


def free_bytes() -> int:
    """Bytes that JAX may still take; opens the device."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    return total_bytes() if not stats else stats["bytes_limit"] - stats["bytes_in_use"]


def is_opened() -> bool:
    """Whether JAX has opened its devices, after which settings of its memory are ignored."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _gpu() -> tuple[str, int] | None:
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(visible))
                if visible.isdigit()
                else nvml.nvmlDeviceGetHandleByUUID(visible.encode())
            )
            return nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle).total
        finally:
            nvml.nvmlShutdown()
    return None
