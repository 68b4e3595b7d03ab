"""Comparing and fingerprinting values by their bits."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from isojax.errors import MismatchError

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def digest(tree: Any) -> str:
    """SHA-256 over the names, shapes, dtypes and bytes of the leaves of `tree`.

    Leaves are taken by sorted name, so that the order in which a tree was built does not matter.
    Names are paths without brackets (`layers.0.norm`): a dict, a list and an `nnx` module that
    call their leaves alike have the same digest. -0.0 and 0.0 differ, and so do two NaNs of other bits.
    """
    total = hashlib.sha256()
    for name, leaf in sorted(_named_leaves(tree).items()):
        data = _host(leaf, name)
        total.update(f"{name}\0{data.dtype.name}{list(data.shape)}\0".encode())
        total.update(np.ascontiguousarray(data).view(np.uint8).data if data.size else b"")
    return total.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One element whose bits differ.

    Attributes:
        leaf: Name of the array inside the compared trees, empty for a bare array.
        index: Where it is in the array.
        values: Both values.
        patterns: Both bit patterns, in hexadecimal.
    """

    leaf: str
    index: tuple[int, ...]
    values: tuple[float, float]
    patterns: tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How many elements were compared and how many differ in a bit.

    Attributes:
        compared: Elements compared.
        different: Elements with other bits.
        first: The first of them, by leaf name and row-major index.
        max_abs_difference: Largest |a - b|, for display; infinite if only one side is finite.
    """

    compared: int
    different: int
    first: Difference | None
    max_abs_difference: float

    def __str__(self) -> str:
        return f"{self.compared:,} compared, {self.different:,} different"

    def to_json(self) -> dict[str, Any]:
        """Plain types, with infinities as text."""
        plain = dataclasses.asdict(self)
        if not math.isfinite(self.max_abs_difference):
            plain["max_abs_difference"] = str(self.max_abs_difference)
        if self.first:
            plain["first"]["values"] = [repr(value) for value in self.first.values]
        return plain

    def raise_if_different(
        self,
        context: str = "",
        *,
        noun: str = "values",
        sides: tuple[str, str] = ("first", "second"),
        locate: Callable[[tuple[int, ...]], str] | None = None,
        notes: Sequence[str] = (),
        allow_empty: bool = False,
    ) -> None:
        """Raises unless every compared bit is equal.

        Args:
            context: Said after the count, e.g. `"no update was applied"`.
            noun: What was compared.
            sides: Where the two values come from, e.g. `("rollout", "trainer")`.
            locate: Says in words where an index is.
            notes: Further lines of the message: weights, how to reproduce.
            allow_empty: Whether nothing to compare counts as equal; by default it is a mismatch,
                because a check that saw nothing has shown nothing.

        Raises:
            MismatchError: If something differs, or nothing was compared.
        """
        tail = f"; {context}" if context else ""
        if not self.compared and not allow_empty:
            raise MismatchError(
                "\n  ".join(
                    [f"0 {noun} were compared{tail}.", "pass a mask that selects some, or allow_empty=True", *notes]
                )
            )
        if self.first:
            raise MismatchError(
                "\n  ".join(
                    [
                        f"{self.different:,} of {self.compared:,} {noun} differ{tail}.",
                        self._first_line(self.first, sides, locate),
                        *notes,
                    ]
                )
            )

    def _first_line(self, first: Difference, sides: tuple[str, str], locate: Any) -> str:
        place = locate(first.index) if locate else f"{first.leaf}{list(first.index)}"
        both = [
            f"{side} {value:.9g} ({pattern})"
            for side, value, pattern in zip(sides, first.values, first.patterns, strict=True)
        ]
        return f"{place}: {', '.join(both)}; largest difference {self.max_abs_difference:.3g}"


def compare_bits(a: Any, b: Any, *, where: Any = None) -> Comparison:
    """Compares two arrays, or two trees of arrays, bit by bit.

    Args:
        a: Array or tree of arrays.
        b: The same names, shapes and dtypes.
        where: Boolean mask of the elements to compare, broadcast to every array.

    Returns:
        The counts and the first difference. Equal NaN patterns are equal; -0.0 and 0.0 are not.

    Raises:
        ValueError: If names, shapes or dtypes differ: then there are no bits to compare.
    """
    left, right = _named_leaves(a), _named_leaves(b)
    if left.keys() != right.keys():
        odd = ", ".join(sorted(left.keys() ^ right.keys()))
        raise ValueError(f"compare_bits compares arrays of the same names, only one side has {odd}")
    compared = different = 0
    first, largest = None, 0.0
    for name in sorted(left):
        x, y = _host(left[name], name), _host(right[name], name)
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"compare_bits compares arrays of one shape and dtype, got {_shape(x)} and {_shape(y)}"
                f"{f' for {name}' if name else ''}: cast or reshape the one that was made last"
            )
        mask = np.broadcast_to(True if where is None else _mask(where), x.shape)
        differs = (_patterns(x) != _patterns(y)) & mask
        compared += int(mask.sum())
        if not differs.any():
            continue
        different += int(differs.sum())
        largest = max(largest, _largest_difference(x[differs], y[differs]))
        if first is None:
            index = np.unravel_index(int(differs.argmax()), x.shape)
            first = _difference(name, tuple(map(int, index)), x[index], y[index])
    return Comparison(compared, different, first, largest)


def assert_bit_equal(actual: Any, expected: Any, *, where: Any = None) -> None:
    """Asserts that two arrays, or trees of arrays, have equal bits; for tests.

    Raises:
        AssertionError: With the count and the first difference.
    """
    try:
        compare_bits(actual, expected, where=where).raise_if_different(
            sides=("actual", "expected"), allow_empty=where is None
        )
    except MismatchError as error:
        raise AssertionError(str(error)) from None


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the tree have one name: use keys that differ as text")
    return named


def _host(leaf: Any, name: str) -> np.ndarray:
    if isinstance(leaf, jax.Array):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not leaf.is_fully_addressable:
            raise ValueError(
                f"{name or 'the array'} lies on devices of other processes: gather it, or digest each process's shards"
            )
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUM":
        raise ValueError(f"{name or 'the value'} is no array of numbers: {type(leaf).__name__}")
    return array


def _patterns(x: np.ndarray) -> np.ndarray:
    if x.dtype.itemsize not in _UNSIGNED or x.dtype.kind == "c":
        raise ValueError(f"compare_bits has no integer view of {x.dtype.name}: compare its parts")
    return np.ascontiguousarray(x).view(_UNSIGNED[x.dtype.itemsize]).reshape(x.shape)


def _mask(where: Any) -> np.ndarray:
    mask = np.asarray(where)
    if mask.dtype != np.bool_:
        mask = mask != 0
    return mask


def _largest_difference(x: np.ndarray, y: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        gap = np.abs(x.astype(np.float64) - y.astype(np.float64))
    return float(np.nan_to_num(gap, nan=math.inf, posinf=math.inf).max())


def _difference(name: str, index: tuple[int, ...], x: Any, y: Any) -> Difference:
    pair = np.stack([x, y])
    bits = _patterns(pair)
    digits = 2 * pair.dtype.itemsize
    return Difference(
        name, index, (float(pair[0]), float(pair[1])), (f"{int(bits[0]):0{digits}x}", f"{int(bits[1]):0{digits}x}")
    )


def _shape(x: np.ndarray) -> str:
    return f"{x.dtype.name}{list(x.shape)}"
