"""On what a program runs, as far as it decides bits."""

import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

import jax

from isojax.contract.flags import shared_flags

_PACKAGES = ("isojax", "jax", "jaxlib", "flax")
_CONFIG = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
)


def deployment_facts() -> dict[str, str]:
    """Device, versions, compiler flags and JAX settings of this process, each under its name.

    Mesh shapes and device counts are not among them: that bits do not depend on them is what
    contracts claim.
    """
    device = jax.devices()[0]
    facts = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "compiler": device.client.platform_version,
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE", "0"),
    }
    if device.platform == "cpu":
        facts["host"] = _host()
    facts |= {name: _version(name) for name in _PACKAGES}
    facts |= {name: str(jax.config.values[name]) for name in _CONFIG}
    return facts | {f"--{name}": value for name, value in shared_flags().items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from a checkout"


@functools.cache
def _host() -> str:
    """The processor and the instructions that LLVM may use on it: XLA compiles for the host."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    lines = {key.strip(): value.strip() for key, _, value in pairs}
    instructions = " ".join(sorted(lines.get("flags", lines.get("Features", "")).split()))
    name = lines.get("model name", platform.machine())
    return f"{platform.machine()} {name} {hashlib.sha256(instructions.encode()).hexdigest()[:12]}"
