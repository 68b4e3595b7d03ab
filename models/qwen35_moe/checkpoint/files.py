"""Safetensors folders: one file or shards with an index. Headers are checked before any tensor is read."""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from isojax.errors import WeightsError

type Pieces = dict[str, tuple[int, Callable[[], np.ndarray]]]
"""Bytes of each tensor to be written by its name, and what makes its values when their turn comes."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What a header says of one tensor; `dtype` in the words of the format, e.g. `"BF16"`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def scan(folder: Path) -> tuple[dict[str, Entry], list[str]]:
    """Reads the headers of a checkpoint.

    Returns:
        Every tensor by its name in the files, and what is wrong with the files: one sentence for each tensor
        that is cut off, each file that is missing, and each tensor that index and shards disagree about.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists() == index.exists():
        found = "both" if index.exists() else "neither"
        return {}, [f"{folder} holds {found} of {_SINGLE} and {_INDEX}: expected one of them"]
    if single.exists():
        return _header(single)

    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for file in sorted(set(weight_map.values())):
        # Shards lie in the folder; each may itself be a link to elsewhere, as in caches of the hub.
        if not re.fullmatch(r"[\w.-]+\.safetensors", file):
            problems.append(f"{_INDEX} names the file {file!r}, expected the name of a shard in {folder}")
            continue
        if not (folder / file).exists():
            lost = [name for name, where in weight_map.items() if where == file]
            problems += [f"{name} is missing: there is no {folder / file}" for name in lost]
            continue
        inside, wrong = _header(folder / file)
        problems += wrong
        for name in inside:
            if weight_map.get(name) != file:
                problems.append(f"{name} is in {file}, the index puts it in {weight_map.get(name, 'no file')}")
        for name, where in weight_map.items():
            if where == file and name not in inside:
                problems.append(f"{name} is missing from {file}, where the index puts it")
        entries |= inside
    return entries, problems


def _header(file: Path) -> tuple[dict[str, Entry], list[str]]:
    """The tensors of one file, and those that its header promises and its length cannot hold."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            return {}, [f"{file} is cut off inside its header"]
        try:
            header: dict[str, dict] = json.loads(stream.read(length))
        except ValueError:
            return {}, [f"{file} has no header that can be read"]
    header.pop("__metadata__", None)
    room = size - 8 - length
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    last = 0
    for name, meta in header.items():
        start, end = meta["data_offsets"]
        entries[name] = Entry(file, meta["dtype"], tuple(meta["shape"]), end - start)
        last = max(last, end)
        if end > room:
            problems.append(f"{name} is cut off: {file} is {end - room} bytes too short for it")
    if room > last:
        problems.append(f"{file} has {room - last} bytes after its last tensor")
    return entries, problems


@contextlib.contextmanager
def reader(entries: dict[str, Entry]) -> Iterator[Callable[[str], np.ndarray]]:
    """A function from a tensor's name to its values, in the dtype of the file.

    Raises:
        WeightsError: If a file is no longer what its header said.
    """
    with contextlib.ExitStack() as stack:
        handles = {}

        def read(name: str) -> np.ndarray:
            file = entries[name].file
            try:
                if file not in handles:
                    # A memory map would read zeros past the end of a file that is cut meanwhile; pread fails.
                    handles[file] = stack.enter_context(safe_open(file, "numpy", backend="pread"))
                return handles[file].get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{name} cannot be read from {file}: {error}") from error

        yield read


def write(folder: Path, pieces: Pieces, shard_bytes: int) -> None:
    """Writes tensors in the order given, one shard in memory at a time.

    One file where all fit in `shard_bytes`, else shards of at most that (or of one tensor) and their index.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (size, _) in pieces.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    count = len(shards)
    names = [_SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file, shard in zip(names, shards, strict=True):
        save_file({name: pieces[name][1]() for name in shard}, folder / file, metadata={"format": "pt"})
    if count > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(size for size, _ in pieces.values())}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
