"""From parameters to a Hugging Face folder that transformers and vLLM load as they are."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import ml_dtypes
import numpy as np

from isojax.errors import WeightsError
from qwen35_moe.checkpoint import files
from qwen35_moe.checkpoint.load import Manifest, Params
from qwen35_moe.checkpoint.names import Layout, Tensor, leaf_shapes, tensors
from qwen35_moe.config import Config

type ExportDtype = Literal["file", "bfloat16", "float32"]

_DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
_NAMED = {"float32": "F32", "bfloat16": "BF16"}
_KEPT_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")  # In releases, where all else is bfloat16.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)


class Tokenizer(Protocol):
    def save_pretrained(self, folder: Path, /) -> Any: ...


def export(
    folder: str | Path,
    params: Params,
    config: Config,
    manifest: Manifest | None = None,
    *,
    layout: Layout | None = None,
    dtype: ExportDtype = "file",
    tokenizer: Tokenizer | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a checkpoint: all of it, or nothing.

    Args:
        folder: Made by this call; may be there only if it is empty.
        params: float32, nested as `load_params` gives them.
        config: Written as `config.json`.
        manifest: Of the checkpoint that the parameters came from; its dtypes are kept, its tokenizer and
            the tensors passed through are copied.
        layout: How names are formed; by default as in releases: fused experts, and `model.language_model.` under
            a multimodal config.
        dtype: `"file"` for the dtypes of the manifest (without one, those of releases), or one for all tensors.
            bfloat16 is rounded to nearest, ties to even.
        tokenizer: Saved in place of the manifest's.
        shard_bytes: Larger checkpoints are cut into shards with an index.

    Raises:
        WeightsError: If parameters do not have the leaves, shapes or dtype that the config describes (names
            them all), or if the folder is in use.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} is in use: export into a new folder, an old checkpoint is never overwritten")
    leaves = _checked_leaves(params, config)
    layout = layout or Layout(wrapped=config.is_multimodal)
    entries, problems = files.scan(manifest.folder) if manifest and manifest.passed_through else ({}, [])
    if problems:
        raise WeightsError(f"{folder} was not written, tensors to pass through cannot be read: {'; '.join(problems)}")

    # Written beside the folder and renamed, so that whoever sees the folder sees all of it.
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        with files.reader(entries) as read:
            makers = _makers(leaves, config, manifest, layout, dtype)
            for name in manifest.passed_through if manifest else ():
                size = math.prod(entries[name].shape) * _item_size(entries[name].dtype)
                makers[name] = (size, lambda name=name: read(name))
            files.write(partial, {n: size for n, (size, _) in makers.items()}, lambda n: makers[n][1](), shard_bytes)
        (partial / "config.json").write_text(json.dumps(_config_json(config, dtype), indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        elif manifest is not None:
            for file in _COPIED:
                if (manifest.folder / file).exists():
                    shutil.copyfile(manifest.folder / file, partial / file)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
