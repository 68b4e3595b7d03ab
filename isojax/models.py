"""Policies from checkpoints."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

from isojax.contract import load
from isojax.errors import CheckpointError
from pallas_kernels.binding import bind
from qwen35_moe import Config, Qwen35Moe
from qwen35_moe.checkpoint import load_params, tokenizer_size


def from_pretrained(
    path: str | os.PathLike[str], *, numerics: str = "exact", dtype: Literal["bfloat16", "float32"] = "bfloat16"
) -> Qwen35Moe:
    """The policy of a Hugging Face folder: float32 parameters, computed in `dtype`.

    Args:
        path: The folder.
        numerics: The contract that its ops keep: `"exact"`, or `"native"`, which promises nothing.
        dtype: What matrices are rounded to and activations are kept in.

    Raises:
        CheckpointError: If there is no such folder.
        ConfigError: If its config is not of a model that isojax runs, or its tokenizer has more words than the model.
        WeightsError: If its tensors are not those of the config; names them all.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: name a Hugging Face folder")
    config = Config.from_hf(folder, compute_dtype=dtype)
    config = dataclasses.replace(config, tokenizer_size=tokenizer_size(folder))
    params, _ = load_params(folder, config)
    model = Qwen35Moe(config, params, bind(load(numerics)))
    model.folder = str(folder)  # Where its tokenizer is.
    return model
