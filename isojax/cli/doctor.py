"""Is everything here that isojax needs, in the versions it was made for?"""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from isojax.contract.deployment import deployment_facts
from isojax.contract.flags import rounding_reason, xla_flags

_PACKAGES = ("isojax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "torch", "vllm", "numpy")
_NEEDED = {"jax": "0.11.2", "vllm": "0.33"}


def examine() -> dict[str, Any]:
    """`facts` by section, and `problems`: what would stop or weaken a run, with what to do."""
    problems: list[str] = []
    versions = {name: _version(name) for name in _PACKAGES}
    for name, needed in _NEEDED.items():
        if not versions[name].startswith(needed):
            problems.append(f"{name} is {versions[name]}, isojax was made for {needed}: install that version")
    if sys.version_info[:2] != (3, 12):
        problems.append(f"Python is {sys.version.split()[0]}, isojax needs 3.12")
    flags = xla_flags()
    for name, value in flags.items():
        if reason := rounding_reason(name, value):
            problems.append(f"XLA flag --{name}={value} {reason}: unset it")
    facts = {
        "device": deployment_facts(),
        "versions": {"python": sys.version.split()[0]} | versions,
        "XLA": {f"--{name}": value for name, value in flags.items()} or {"flags": "none"},
        "vLLM": _vllm(problems),
    }
    return {"facts": facts, "problems": problems}


def _vllm(problems: list[str]) -> dict[str, str]:
    """vLLM's build and whether it will find our plugin; vLLM itself is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        problems.append("vLLM is not installed: pip install 'isojax[vllm]'; training needs its engine")
        return {"build": "not installed"}
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    has_extension = any(True for folder in folders for _ in folder.glob("_C*.so"))
    found = {point.name for point in importlib.metadata.entry_points(group="vllm.platform_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if "isojax" not in found:
        problems.append("vLLM will not find isojax's plugin: install isojax, a path on PYTHONPATH has no entry points")
    if allowed is not None and not {"isojax", "isojax_models"} <= set(allowed.split(",")):
        problems.append(f"VLLM_PLUGINS={allowed} leaves isojax out: add isojax,isojax_models")
    if others := found - {"isojax", "tpu", "cuda", "rocm", "cpu", "xpu"}:
        problems.append(
            f"other platform plugins of vLLM are installed ({', '.join(sorted(others))}): only one may be active"
        )
    return {
        "build": "with CUDA extensions, which our platform does not load" if has_extension else "Python only",
        "plugin": "installed" if "isojax" in found else "missing",
        "active here": "yes" if os.environ.get("ISOJAX_VLLM") == "1" else "no: LLM and isojax serve turn it on",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
