"""The model that an engine serves: one of this process, shared with its trainer, or a checkpoint."""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import safetensors.numpy

from isojax.contract import load
from isojax.errors import ConfigError
from pallas_kernels.binding import Ops, bind
from qwen35_moe.checkpoint import load_params, tokenizer_size
from qwen35_moe.config import Config
from qwen35_moe.model import rollout_params
from rollout_bridge import cache, weights
from rollout_bridge.device import on_device

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OFFERED: dict[str, "Served"] = {}
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as the worker needs it.

    Attributes:
        config: Its sizes.
        ops: The bound ops.
        params: Its parameters, float32.
    """

    config: Config
    ops: Ops
    params: Mapping[str, Any]


def offer(model: Any) -> str:
    """Keeps a model of this process for an engine that is about to start here; returns what `of` knows it by."""
    token = f"model {next(_numbers)}"
    _OFFERED[token] = Served(model.config, model.ops, model.params())
    return token


def of(config: "VllmConfig") -> Served:
    """The model that an engine configuration names.

    Raises:
        ConfigError: If it names a model of another process.
        WeightsError: If the checkpoint is incomplete or of another model.
    """
    options = config.additional_config if isinstance(config.additional_config, dict) else {}
    token = options.get("isojax_model")
    if token is not None:
        if token not in _OFFERED:
            raise ConfigError("a model of another process cannot be served: give LLM the checkpoint's path")
        return _OFFERED.pop(token)
    return _from_checkpoint(Path(config.model_config.model), config, options.get("numerics", "exact"))


def read_checkpoint(path: str | Path, config: Config) -> dict[str, Any]:
    """The float32 parameters of a checkpoint folder.

    Raises:
        WeightsError: If a tensor is missing, unknown, misshapen or cut off.
    """
    return load_params(path, config)[0]


@contextlib.contextmanager
def written(params: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, str]]]:
    """A file with `params` for an engine in another process, and their fingerprints; removed afterwards."""
    flat = {name: np.asarray(value) for name, value in weights.flatten(params).items()}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="isojax_", dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder) / "weights.safetensors"
        safetensors.numpy.save_file(flat, path)
        yield path, weights.digests(flat)


def read_written(path: Path) -> dict[str, Any]:
    """What `written` wrote."""
    return weights.unflatten(safetensors.numpy.load_file(path))


def _from_checkpoint(folder: Path, config: "VllmConfig", numerics: str) -> Served:
    sizes = dataclasses.replace(cache.config_of(config.model_config), tokenizer_size=tokenizer_size(folder))
    ops = bind(load(numerics))
    # The checkpoint is read and rounded on the host: the device never holds its float32 form.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = jax.jit(lambda p: rollout_params(p, sizes, ops))(read_checkpoint(folder, sizes))
    return Served(sizes, ops, on_device(params))
