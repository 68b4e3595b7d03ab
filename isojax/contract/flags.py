"""Compiler flags: which may not be set, which do not matter, and which both programs must share."""

import os
from collections.abc import Mapping

from isojax.errors import ContractError

_ON = ("", "1", "true", "yes", "on")

_ROUNDING_WHEN_ON = {
    "xla_cpu_enable_fast_math": "lets LLVM reassociate sums",
    "xla_gpu_enable_fast_math": "lets LLVM reassociate sums",
    "xla_enable_fast_math": "lets LLVM reassociate sums",
    "xla_cpu_enable_fast_min_max": "drops NaN from maxima",
    "xla_gpu_enable_fast_min_max": "drops NaN from maxima",
    "xla_cpu_ftz": "flushes denormals in some programs and not in others",
    "xla_gpu_ftz": "flushes denormals in some programs and not in others",
    "xla_gpu_enable_bf16_3way_gemm": "splits float32 products into bfloat16 ones",
    "xla_gpu_enable_bf16_6way_gemm": "splits float32 products into bfloat16 ones",
    "xla_gpu_enable_reassociation_for_converted_ar": "moves roundings across a sum",
    "xla_disable_all_hlo_passes": "removes the passes that keep barriers and written roundings",
}
_ROUNDING_WHEN_OFF = {
    "xla_cpu_fast_math_honor_nans": "drops NaN",
    "xla_cpu_fast_math_honor_infs": "drops infinities",
    "xla_cpu_fast_math_honor_division": "divides by multiplying with a reciprocal",
    "xla_cpu_fast_math_honor_functions": "takes approximate functions",
}
_ROUNDING_WHEN_SET = {
    name: "removes passes that keep barriers and written roundings"
    for name in ("xla_disable_hlo_passes", "xla_enable_hlo_passes_only", "xla_run_hlo_passes_starting_from")
}
_HARMLESS = (
    "xla_force_host_platform_device_count",
    "xla_dump_",
    "xla_hlo_profile",
    "xla_gpu_cuda_data_dir",
    "xla_gpu_dump_",
)
_DEFAULTS = {"xla_allow_excess_precision": "true"}  # Saying the default is saying nothing.


def xla_flags(text: str | None = None) -> dict[str, str]:
    """The flags of `text`, by default of `XLA_FLAGS`, which may name a file, as XLA reads it."""
    text = os.environ.get("XLA_FLAGS", "") if text is None else text
    text = text.strip()
    if text and not text.startswith("-"):
        with open(text) as file:
            text = file.read()
    pairs = [word.lstrip("-").partition("=") for word in text.split()]
    return {name: value for name, _, value in pairs}


def rounding_reason(name: str, value: str) -> str | None:
    """Why a process with this flag cannot keep a contract, or None."""
    on = value.strip().lower() in _ON
    if name in _ROUNDING_WHEN_SET:
        return _ROUNDING_WHEN_SET[name] if value else None
    return (_ROUNDING_WHEN_ON if on else _ROUNDING_WHEN_OFF).get(name)


def refuse_rounding_flags(text: str | None = None) -> None:
    """Refuses a process whose compiler flags can change a rounding or an order (docs/rules.md, rule 6).

    Args:
        text: Flags as in `XLA_FLAGS`, which is the default.

    Raises:
        ContractError: Names every such flag with what it does.
    """
    reasons = {f"--{n}={v}": why for n, v in xla_flags(text).items() if (why := rounding_reason(n, v))}
    if os.environ.get("NVIDIA_TF32_OVERRIDE", "0") != "0":
        reasons["NVIDIA_TF32_OVERRIDE"] = "rounds the operands of float32 products to TF32"
    if reasons:
        listed = "\n  ".join(f"{flag} {why}" for flag, why in reasons.items())
        raise ContractError(f"the compiler may not change roundings or orders, unset in XLA_FLAGS:\n  {listed}")


def shared_flags(text: str | None = None) -> Mapping[str, str]:
    """The flags that two programs must share: all but those that change no bit."""
    return {
        name: value
        for name, value in sorted(xla_flags(text).items())
        if not name.startswith(_HARMLESS) and _DEFAULTS.get(name) != value.lower()
    }
