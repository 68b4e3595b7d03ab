"""From a Hugging Face folder to parameters: every tensor accounted for, by name, before one is used."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from isojax.errors import WeightsError
from qwen35_moe.checkpoint import files
from qwen35_moe.checkpoint.names import EMBEDDING, HEAD, PASSED_THROUGH, Layout, Tensor, leaf_shapes, nest, tensors
from qwen35_moe.config import Config

type Params = dict[str, Any]

_DTYPES = ("F32", "BF16")
_LISTED = 40  # Violations that a message names; the rest are counted.


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What of a checkpoint is not in its parameters, so that an export can give it back.

    Attributes:
        folder: Where it was read; an export copies its tokenizer and the tensors passed through from there.
        layout: How its names are formed.
        dtypes: Dtype of every tensor in the file (`"BF16"` or `"F32"`), by canonical name.
        passed_through: Names of tensors that isojax does not read (vision tower, multi-token prediction).
    """

    folder: Path
    layout: Layout
    dtypes: dict[str, str]
    passed_through: tuple[str, ...]


def load_params(folder: str | Path, config: Config) -> tuple[Params, Manifest]:
    """Reads a checkpoint into float32 parameters, exactly: no value is rounded.

    Takes fused or unfused experts, names with or without `model.language_model.`, one file or shards.
    Under a tied head, a `lm_head.weight` in the file must have the bits of the embedding.

    Returns:
        The parameters (nested as docs/architecture.md says, one leaf for the same layer of all periods)
        and what is needed to export them as they came.

    Raises:
        WeightsError: If tensors are missing, unknown, misshapen, cut off, or neither float32 nor bfloat16;
            names them all.
    """
    folder = Path(folder)
    entries, problems = files.scan(folder)
    layout, *others = Layout.of(set(entries))
    if others:
        problems.append(f"{folder} mixes forms of names: {', '.join(map(str, (layout, *others)))}")
    if not problems:
        problems = _disagreements(entries, layout, config)
    _refuse(folder, problems)

    wanted = tensors(config)
    with files.reader(entries) as read:
        if config.tie_word_embeddings and HEAD in entries:
            _check_tied(folder, read(HEAD), read(layout.name(EMBEDDING)))
        params = build_params(config, lambda name, tensor: map(read, layout.parts(name, tensor.shape)))
    dtypes = {
        name: _widest({entries[part].dtype for part in layout.parts(name, tensor.shape)})
        for name, tensor in wanted.items()
    }
    passed_through = tuple(sorted(name for name in entries if name.startswith(PASSED_THROUGH)))
    return params, Manifest(folder, layout, dtypes, passed_through)


def build_params(config: Config, read: Callable[[str, Tensor], Iterable[np.ndarray]]) -> Params:
    """Parameters from `read(canonical name, tensor)`, which gives the values of a tensor, in one piece or in many."""
    leaves = {path: np.empty(shape, np.float32) for path, shape in leaf_shapes(config).items()}
    for name, tensor in tensors(config).items():
        leaf = leaves[tensor.leaf]
        values = (leaf if tensor.period is None else leaf[tensor.period]).reshape(-1)  # A view: leaves are contiguous.
        start = 0
        for piece in read(name, tensor):
            values[start : start + piece.size] = piece.reshape(-1)
            start += piece.size
    return nest({path: jnp.asarray(leaf) for path, leaf in leaves.items()})


def _disagreements(entries: dict[str, files.Entry], layout: Layout, config: Config) -> list[str]:
    """What the files hold other than what the config asks for."""
    wanted = {
        name: shape
        for canonical, tensor in tensors(config).items()
        for name, shape in layout.parts(canonical, tensor.shape).items()
    }
    if config.tie_word_embeddings and HEAD in entries:
        wanted[HEAD] = (config.vocab_size, config.hidden_size)
    problems = [f"{name} is missing" for name in wanted if name not in entries]
    for name, entry in entries.items():
        if name.startswith(PASSED_THROUGH):
            continue
        if name not in wanted:
            problems.append(f"{name} is not part of the model that the config describes")
        elif entry.shape != wanted[name]:
            problems.append(f"{name} is {list(entry.shape)}, the config asks for {list(wanted[name])}")
        elif entry.dtype not in _DTYPES:
            problems.append(f"{name} is {entry.dtype}, expected {' or '.join(_DTYPES)}")
    return problems


def _check_tied(folder: Path, head: np.ndarray, embedding: np.ndarray) -> None:
    if head.dtype != embedding.dtype or head.tobytes() != embedding.tobytes():
        _refuse(folder, [f"{HEAD} differs from {EMBEDDING}, yet the config ties them"])


def _widest(dtypes: set[str]) -> str:
    return dtypes.pop() if len(dtypes) == 1 else "F32"


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        heading = f"{folder} was not loaded, {len(problems)} violations:"
        raise WeightsError("\n  ".join([heading, *problems[:_LISTED], *more]))
