"""One text for one value: what digests are taken of."""

import dataclasses
import enum
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax._src.core import AbstractValue, Jaxpr, ShapedArray
from jax._src.dtypes import ExtendedDType
from jax._src.flattree import FlatTree
from jax._src.literals import TypedNdArray
from jax._src.random.prng import PRNGImpl
from jax._src.state.types import AbstractRef
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from isojax.errors import ContractError

type JSON = Any
"""Plain types without floats: None, bool, int, str, and lists and dicts (with text keys) of them."""

_SILENT_FIELDS = {
    ("GridMapping", "debug"),
    ("BlockMapping", "debug"),
    ("BlockMapping", "origin"),  # The argument's name.
    ("CompilerParams", "profile_dir"),
    ("CompilerParams", "profile_space"),
}


def sha256(plain: JSON) -> str:
    """SHA-256 of canonical JSON: sorted keys, no spaces, UTF-8, no floats."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(value: Any, where: str, nested: Callable[[Any], JSON]) -> JSON:
    """`value` of a program parameter as plain JSON, the same in every process.

    Args:
        value: The parameter.
        where: What it is called, for the error.
        nested: Serialises a jaxpr.

    Raises:
        ContractError: If its type is not known: a digest that skipped it would promise too much.
    """
    again = functools.partial(canonical, where=where, nested=nested)
    match value:
        case None | bool() | str():
            return value
        case enum.Enum():
            return {"enum": f"{type(value).__name__}.{value.name}"}
        case int() | np.integer():
            return int(value)
        case float() | np.floating() | complex() | np.bool_() | np.ndarray() | TypedNdArray() | jax.Array():
            return array(value)
        case np.dtype():
            return {"dtype": value.name}
        case ExtendedDType():
            return {"dtype": _stable(str(value), where)}
        case AbstractValue():
            return aval(value, where, nested)
        case Mesh() | AbstractMesh():
            axes = zip(value.axis_names, value.axis_sizes, value.axis_types, strict=True)
            return {"mesh": [[str(name), size, str(kind)] for name, size, kind in axes]}
        case NamedSharding():
            # A sharding that says nothing is none: tracing a gradient writes one where forward tracing does not.
            replicated = all(axis is None for axis in value.spec)
            return None if replicated else {"spec": again(tuple(value.spec)), "mesh": again(value.mesh)}
        case PartitionSpec():
            return {"spec": again(tuple(value))}
        case jax.tree_util.PyTreeDef() | FlatTree():
            return {"tree": _stable(str(value), where)}
        case Mapping():
            pairs = [[again(key), again(item)] for key, item in value.items()]
            return {"map": sorted(pairs, key=_text)}
        case frozenset() | set():
            return {"set": sorted(map(again, value), key=_text)}
        case PRNGImpl():
            return {"prng": value.name}
        case tuple() | list():
            items = [again(item) for item in value]
            names = getattr(value, "_fields", None)
            return {"type": type(value).__name__, **dict(zip(names, items, strict=True))} if names else items
        case Jaxpr():
            return nested(value)
    kind = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if (kind.__name__, f.name) not in _SILENT_FIELDS]
        return {"type": kind.__name__, **{name: again(getattr(value, name)) for name in names}}
    if isinstance(value, type) and issubclass(value, np.generic):
        return {"dtype": np.dtype(value).name}
    if kind.__name__ == "UnspecifiedValue":
        return None
    raise ContractError(
        f"{where} has a value of type {kind.__module__}.{kind.__qualname__}, which a program digest does not know:"
        " say in isojax.contract.canonical what of it decides bits"
    )


def array(value: Any) -> JSON:
    """Dtype, shape and bytes of a constant; bytes of more than a few elements by their SHA-256."""
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    data = np.ascontiguousarray(value)
    content = data.tobytes()
    return {
        "array": [
            data.dtype.name,
            list(np.shape(value)),
            content.hex() if len(content) <= 32 else hashlib.sha256(content).hexdigest(),
        ]
    }


def aval(value: AbstractValue, where: str, nested: Callable[[Any], JSON]) -> JSON:
    """Dtype and shape of a variable; of a reference also its memory space."""
    if isinstance(value, ShapedArray):
        return f"{value.dtype.name}{list(value.shape)}"
    if isinstance(value, AbstractRef):
        inner = canonical(value.inner_aval, where, nested)
        return {"ref": inner, "space": canonical(value.memory_space, where, nested)}
    return {"aval": _stable(value.str_short(), where)}


def _text(plain: JSON) -> str:
    return json.dumps(plain, sort_keys=True)


def _stable(text: str, where: str) -> str:
    if " at 0x" in text:
        raise ContractError(f"{where} prints as {text!r}, which changes from process to process: give it a __repr__")
    return text
