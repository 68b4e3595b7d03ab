"""How much memory there is for pages."""

import os

import jax

_CPU_SHARE, _CPU_MOST = 0.25, 8 << 30


def device_bytes() -> int:
    """Bytes of memory an engine may plan with: the device's limit, or on the CPU a share of the machine's."""
    if (limit := _stats().get("bytes_limit")) is not None:
        return limit
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(machine * _CPU_SHARE), _CPU_MOST)


def free_bytes() -> int:
    """Bytes that nothing holds; on the CPU, which does not say, all of `device_bytes`."""
    return device_bytes() - _stats().get("bytes_in_use", 0)


def is_initialised() -> bool:
    """Whether JAX has opened its devices, after which memory settings are ignored."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _stats() -> dict[str, int]:
    return jax.local_devices()[0].memory_stats() or {}
