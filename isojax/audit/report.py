"""What an audit found, in words, in JSON and as an error."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isojax.errors import AuditError


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Arithmetic outside a region.

    Attributes:
        primitive: The JAX primitive.
        operands: Dtype and shape of its inputs.
        results: Dtype and shape of its outputs.
        file: Source file of the line that made it.
        line: Line in that file.
        function: Function around that line.
        path: The programs around it, from outside in: `("jit", "scan")`.
        problem: What it is, in words that the source might use.
        use: What to write instead.
    """

    primitive: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    file: str
    line: int
    function: str
    path: tuple[str, ...]
    problem: str
    use: str

    @property
    def where(self) -> str:
        """`train.py:41`, relative to the working directory where it lies below it."""
        relative = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        return f"{self.file if relative.startswith('..') else relative}:{self.line}"

    def __str__(self) -> str:
        values = ", ".join(self.operands or self.results)
        place = f" {values} outside an op" if values else ""
        path = f", in {' > '.join(self.path)}" if self.path else ""
        return f"{self.where} ({self.function}) {self.problem}{place}{path}: use {self.use}"


@dataclasses.dataclass(frozen=True, slots=True)
class Allow:
    """An exception from the audit, with the reason for it; it stays in the report.

    Attributes:
        primitive: The primitive that may stand outside a region.
        where: A function name, a file name or a `file:line` that it is allowed in.
        reason: Why no bit depends on it that was promised.
    """

    primitive: str
    where: str
    reason: str

    def __post_init__(self):
        if not self.reason.strip() or not self.where.strip():
            raise ValueError(
                f"allowing {self.primitive} needs a place and a written reason: Allow('add', 'train.py:41', 'because…')"
            )

    def covers(self, finding: Finding) -> bool:
        """Whether `finding` is what was allowed."""
        name = Path(finding.file).name
        places = (finding.function, name, f"{name}:{finding.line}", finding.where)
        return self.primitive == finding.primitive and self.where in places


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The result of an audit.

    Attributes:
        findings: Arithmetic outside regions with its number of call sites, in program order; empty if clean.
        allowed: What was found and allowed, with the reason.
        regions: How many call sites each region has in the program of `platform`; a scan's body counts once.
        platform: Whose branches `regions` counts. Findings come from the branches of every platform.
    """

    findings: Mapping[Finding, int]
    allowed: tuple[tuple[Finding, str], ...]
    regions: Mapping[str, int]
    platform: str

    def __str__(self) -> str:
        count = sum(self.regions.values())
        lines = [f"{len(self.findings)} findings, {count} call sites of {len(self.regions)} regions"]
        lines += map(str, self.findings)
        lines += [f"allowed: {finding} ({reason})" for finding, reason in self.allowed]
        return "\n  ".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain types, for `--json` and for comparing two reports."""
        return {
            "findings": [{**_plain(f), "call_sites": count} for f, count in self.findings.items()],
            "allowed": [{**_plain(f), "reason": reason} for f, reason in self.allowed],
            "regions": dict(self.regions),
            "platform": self.platform,
        }

    def raise_if_findings(self) -> None:
        """Raises unless the program is clean.

        Raises:
            AuditError: Names every line and what to use there.
        """
        if not self.findings:
            return
        lines = [f"{f}{f' ({n} call sites)' if n > 1 else ''}" for f, n in self.findings.items()]
        raise AuditError(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} findings", *lines]))


def _plain(finding: Finding) -> dict[str, Any]:
    return {**dataclasses.asdict(finding), "where": finding.where}
