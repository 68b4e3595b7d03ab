"""What verifying found."""

import dataclasses
from typing import Any, Literal

from isojax.bits import compare_bits
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
        values: Log-probabilities of target tokens, or elements of gradients, which are counted apart.
    """

    name: str
    path: Literal["direct", "engine"]
    compared: int
    different: int
    first: str = ""
    values: Literal["logprobs", "gradients"] = "logprobs"

    @classmethod
    def of(
        cls,
        name: str,
        path: Literal["direct", "engine"],
        got: Any,
        want: Any,
        values: Literal["logprobs", "gradients"] = "logprobs",
    ) -> "Row":
        """Compares two trees of arrays."""
        found = compare_bits(got, want)
        place = ""
        if found.first is not None:
            pairs = zip(found.first.values, found.first.patterns, strict=True)
            both = ", ".join(f"{value:.9g} ({pattern})" for value, pattern in pairs)
            place = f"{found.first.leaf}{list(found.first.index)}: {both}"
        return cls(name, path, found.compared, found.different, place, values)

    def __str__(self) -> str:
        return f"{self.path:7} {self.name:44} {self.compared:>9,} compared {self.different:>7,} different"


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All rows; `str` gives the closing line."""

    rows: tuple[Row, ...]

    @property
    def compared(self) -> int:
        """Log-probabilities compared."""
        return self._count("logprobs", "compared")

    @property
    def different(self) -> int:
        """Log-probabilities whose bits differ."""
        return self._count("logprobs", "different")

    def __str__(self) -> str:
        gradients = self._count("gradients", "compared")
        beside = f"; gradient elements: {gradients:,}, different: {self._count('gradients', 'different'):,}"
        counted = f"logprobs compared: {self.compared:,}, different: {self.different:,}"
        return f"verify: {len(self.rows)} rows, {counted}{beside if gradients else ''}"

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "compared": self.compared,
            "different": self.different,
            "gradients_compared": self._count("gradients", "compared"),
            "gradients_different": self._count("gradients", "different"),
        }

    def _count(self, values: str, column: str) -> int:
        return sum(getattr(row, column) for row in self.rows if row.values == values)

    def raise_if_different(self) -> None:
        """Raises unless every value of every row is equal.

        Raises:
            MismatchError: Names the rows that differ; also if a row compared nothing.
        """
        wrong = [row for row in self.rows if row.different or not row.compared]
        if wrong or not self.rows:
            lines = [f"{row.name}: {row.different:,} of {row.compared:,} differ, first at {row.first}" for row in wrong]
            raise MismatchError("\n  ".join([f"{len(wrong)} of {len(self.rows)} rows differ", *lines]))
