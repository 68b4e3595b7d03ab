"""What every test stands on: where programs are cached, which devices there are, checked shapes.

The environment is set before anything imports JAX.
"""

import glob
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*"))

for _name, _value in {
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    # Eight devices for every test: one device more or less costs nothing measurable on the CPU.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.__stderr__",
}.items():
    os.environ.setdefault(_name, _value)

# Shapes of public functions are checked in every test; must come before the packages are imported.
from hypothesis import settings  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["isojax", "pallas_kernels", "qwen35_moe", "rollout_bridge"], "beartype.beartype")

# A first example may compile a program: time says nothing about it.
settings.register_profile("isojax", deadline=None)
settings.load_profile("isojax")


def pytest_report_header() -> str:
    return "gpu tests run on this machine's CUDA device" if _HAS_GPU else "gpu tests deselected: no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files that start engines take minutes, those of single ops seconds: come last, they let both workers end together.
    items.sort(key=lambda item: "pallas_kernels" in item.path.parts)
    if _HAS_GPU:
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture(scope="session", autouse=True)
def _absl_leaves_pytests_streams_open() -> None:
    """Where vLLM sets logging up anew, absl closes its stream unless that is a standard one: not pytest's."""
    from absl import logging

    logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


@pytest.fixture(scope="module", autouse=True)
def _programs_leave_before_they_are_too_many() -> Iterator[None]:
    """The code of a compiled program is memory maps, of which Linux gives a process 65,530 (`vm.max_map_count`); past
    them the next exception crashes in libgcc, and tvm_ffi's handler of that crash waits for itself for ever."""
    yield
    if len(Path("/proc/self/maps").read_bytes().splitlines()) > 25_000:
        import jax

        jax.clear_caches()
