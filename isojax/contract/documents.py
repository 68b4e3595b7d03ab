"""Finds and reads contract documents."""

import importlib.resources
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isojax.contract.contract import Contract
from isojax.contract.document import Document
from isojax.errors import ContractError


def names() -> tuple[str, ...]:
    """The contracts that isojax ships."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


def load(name: str | Path) -> Contract:
    """The contract `name` of isojax, or the one in the TOML file `name`.

    A document may say `functions_of = "exact"`: then its ops compute the functions of
    that contract in the same phases, and nothing is said about their order.

    Raises:
        ContractError: With everything that is wrong in the document, at once.
    """
    path = _path(name)
    data = _read(path)
    if (base := data.pop("functions_of", None)) is not None:
        data["ops"] = {
            op: {key: fields[key] for key in ("computes", "phases") if key in fields}
            for op, fields in _read(_path(base)).get("ops", {}).items()
        } | data.get("ops", {})
    try:
        return Contract(Document.model_validate(data))
    except ValidationError as error:
        problems = "\n  ".join(f"{_place(e['loc'])}: {e['msg']}{_given(e)}" for e in error.errors())
        raise ContractError(f"{path} is no contract document:\n  {problems}") from None


def _folder() -> Path:
    """`isojax/contracts` where isojax is installed, `contracts` beside the package in a checkout."""
    package = Path(str(importlib.resources.files("isojax")))
    return next(folder for folder in _candidates(package) if folder.is_dir())


def _candidates(package: Path) -> tuple[Path, Path]:
    return package / "contracts", package.parent / "contracts"


def _path(name: str | Path) -> Path:
    if isinstance(name, Path) or name.endswith(".toml"):
        return Path(name)
    path = _folder() / f"{name}.toml"
    if not path.is_file():
        raise ContractError(f"isojax has no contract {name!r}: use {', '.join(names())}, or the path of a .toml file")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ContractError(f"no contract document at {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ContractError(f"{path} is no TOML: {error}") from error


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) or "the document"


def _given(error: Any) -> str:
    plain = isinstance(error["input"], str | int | float | bool)
    return f", got {error['input']!r}" if plain and error["type"] != "extra_forbidden" else ""
