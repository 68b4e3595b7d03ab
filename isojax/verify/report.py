"""What verifying found."""

import dataclasses
from typing import Any, Literal

from isojax.bits import Comparison, compare_bits
from isojax.errors import MismatchError


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One way to run the model, compared with the trainer's forward.

    Attributes:
        name: What was done, e.g. `"bfloat16 prefill in pieces of 65"`.
        path: Whether the model's phases ran by hand or in the engine.
        compared: Values compared.
        different: Values whose bits differ.
        first: Where the first difference is, and both values.
    """

    name: str
    path: Literal["direct", "engine"]
    compared: int
    different: int
    first: str = ""

    @classmethod
    def of(cls, name: str, path: Literal["direct", "engine"], got: Any, want: Any) -> "Row":
        """Compares two trees of arrays."""
        return cls.from_comparison(name, path, compare_bits(got, want))

    @classmethod
    def from_comparison(cls, name: str, path: Literal["direct", "engine"], found: Comparison) -> "Row":
        place = ""
        if found.first is not None:
            pairs = zip(found.first.values, found.first.patterns, strict=True)
            values = ", ".join(f"{value:.9g} ({pattern})" for value, pattern in pairs)
            place = f"{found.first.leaf}{list(found.first.index)}: {values}"
        return cls(name, path, found.compared, found.different, place)

    def __str__(self) -> str:
        return f"{self.path:7} {self.name:44} {self.compared:>9,} compared {self.different:>7,} different"


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All rows; `str` gives the closing line."""

    rows: tuple[Row, ...]

    @property
    def compared(self) -> int:
        return sum(row.compared for row in self.rows)

    @property
    def different(self) -> int:
        return sum(row.different for row in self.rows)

    def __str__(self) -> str:
        return f"verify: {len(self.rows)} rows, {self.compared:,} values compared, {self.different:,} different"

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "compared": self.compared,
            "different": self.different,
        }

    def raise_if_different(self) -> None:
        """Raises unless every value of every row is equal.

        Raises:
            MismatchError: Names the rows that differ; also if a row compared nothing.
        """
        wrong = [row for row in self.rows if row.different or not row.compared]
        if wrong or not self.rows:
            lines = [f"{row.name}: {row.different:,} of {row.compared:,} differ, first at {row.first}" for row in wrong]
            raise MismatchError("\n  ".join([f"{len(wrong)} of {len(self.rows)} rows differ", *lines]))
