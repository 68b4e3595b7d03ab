"""From parameters to a Hugging Face folder that transformers and vLLM load as they are."""

import functools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from isojax.errors import WeightsError
from qwen35_moe.checkpoint import files
from qwen35_moe.checkpoint.load import Manifest, Params
from qwen35_moe.checkpoint.names import Layout, leaf_shapes, tensors
from qwen35_moe.config import Config

type ExportDtype = Literal["file", "bfloat16", "float32"]

_DTYPES = {"F32": "float32", "BF16": "bfloat16"}
_KEPT_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")  # In releases, where all else is bfloat16.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)


@runtime_checkable
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
    passed_through = manifest.passed_through if manifest else ()
    entries, problems = files.scan(manifest.folder) if manifest and passed_through else ({}, [])
    if problems := problems or [f"{name} is gone" for name in passed_through if name not in entries]:
        raise WeightsError(f"{folder} was not written, tensors to pass through cannot be read: {'; '.join(problems)}")

    # Written beside the folder and renamed, so that whoever sees the folder sees all of it.
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        with files.reader(entries) as read:
            pieces = _pieces(leaves, config, manifest, layout, dtype)
            for name in passed_through:
                pieces[name] = (entries[name].num_bytes, functools.partial(read, name))
            files.write(partial, pieces, shard_bytes)
        (partial / "config.json").write_text(json.dumps(_config_json(config, dtype), indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        elif manifest is not None:
            for file in _COPIED:
                if (manifest.folder / file).exists():
                    shutil.copyfile(manifest.folder / file, partial / file)
        for file in partial.iterdir():
            shutil.copymode(partial / "config.json", file)  # safetensors makes files that only their owner can read.
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _pieces(
    leaves: dict[tuple[str, ...], jax.Array],
    config: Config,
    manifest: Manifest | None,
    layout: Layout,
    dtype: ExportDtype,
) -> files.Pieces:
    """Bytes and values of every tensor of the text model by its name in the files."""

    @functools.lru_cache(maxsize=1)  # The experts of one layer are cut out of the same tensor, one after another.
    def values(canonical: str) -> np.ndarray:
        tensor = wanted[canonical]
        leaf = leaves[tensor.leaf]
        stored = np.asarray(leaf if tensor.period is None else leaf[tensor.period])
        return stored.astype(dtypes[canonical]).reshape(-1)

    def piece(canonical: str, start: int, shape: tuple[int, ...]) -> np.ndarray:
        return values(canonical)[start : start + math.prod(shape)].reshape(shape)

    wanted = tensors(config)
    dtypes = {name: _dtype(name, manifest, dtype) for name in wanted}
    pieces: files.Pieces = {}
    for canonical, tensor in wanted.items():
        start = 0
        for name, shape in layout.parts(canonical, tensor.shape).items():
            num_bytes = math.prod(shape) * dtypes[canonical].itemsize
            pieces[name] = (num_bytes, functools.partial(piece, canonical, start, shape))
            start += math.prod(shape)
    return pieces


def _dtype(canonical: str, manifest: Manifest | None, dtype: ExportDtype) -> np.dtype:
    if dtype != "file":
        return np.dtype(dtype)
    if manifest is not None:
        return np.dtype(_DTYPES[manifest.dtypes[canonical]])
    return np.dtype("float32" if canonical.endswith(_KEPT_FLOAT32) else "bfloat16")


def _checked_leaves(params: Params, config: Config) -> dict[tuple[str, ...], jax.Array]:
    """The leaves by path, once they are those of the config."""
    given = {
        tuple(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    wanted = leaf_shapes(config)
    problems = [f"{'.'.join(path)} is missing" for path in wanted.keys() - given.keys()]
    problems += [f"{'.'.join(path)} is not a parameter of the model" for path in given.keys() - wanted.keys()]
    for path in wanted.keys() & given.keys():
        got = f"{given[path].dtype.name}{list(given[path].shape)}"
        if got != (want := f"float32{list(wanted[path])}"):
            problems.append(f"{'.'.join(path)} is {got}, expected {want}")
    if problems:
        raise WeightsError("\n  ".join([f"{len(problems)} parameters cannot be exported:", *sorted(problems)]))
    return given


def _config_json(config: Config, dtype: ExportDtype) -> dict[str, Any]:
    """The config, with the dtype that most tensors have."""
    outer = config.to_hf()
    if dtype != "file":
        for section in (outer, outer["text_config"]) if config.is_multimodal else (outer,):
            section.pop("torch_dtype", None)
            section["dtype"] = dtype
    return outer
