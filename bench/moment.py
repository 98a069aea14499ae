"""What occupied the memory at one moment, added up by category, module, operator and source line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.show import size

if TYPE_CHECKING:
    from bench.vgpu.attribution import Allocation

COLUMNS = ("category", "module", "operator", "line")
"""The fields of an allocation that memory is added up by."""

TOP = 10
"""Rows of a table where nothing else is asked; the rest is one row more."""

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Moment:
    """All that was allocated at one moment.

    Attributes:
        name: The moment, in words.
        reserved_bytes: In segments then; at a peak, their highest bytes.
        allocations: Each with who made it, largest first.
    """

    name: str
    reserved_bytes: int
    allocations: Sequence[Allocation]

    @property
    def allocated_bytes(self) -> int:
        """In blocks, which is what every table adds up to."""
        return sum(allocation.size_bytes for allocation in self.allocations)

    def by(self, column: str) -> dict[str, int]:
        """Bytes by what one of `COLUMNS` holds."""
        sums: Counter[str] = Counter()
        for allocation in self.allocations:
            sums[getattr(allocation, column)] += allocation.size_bytes
        return dict(sums)

    def rows(self, column: str, top: int) -> dict[str, int]:
        """`by`, in which layers that repeat are one if there are more names than rows."""
        sums = self.by(column)
        return sums if len(sums) <= top else folded(sums)

    def largest(self, top: int) -> tuple[list[tuple[Allocation, int]], int]:
        """The largest allocations, equal ones of layers that repeat counted together; and how many others there are."""
        groups: dict[Allocation, list[Allocation]] = {}
        for made in self.allocations:
            groups.setdefault(made._replace(module=_folded(made.module)), []).append(made)
        rows = [(made if len(same) > 1 else same[0], len(same)) for made, same in list(groups.items())[:top]]
        return rows, len(self.allocations) - sum(count for _, count in rows)

    def headline(self) -> str:
        """Moment and totals."""
        return (
            f"{self.name}: {size(self.allocated_bytes)} allocated in {len(self.allocations):,} blocks, "
            f"{size(self.reserved_bytes)} reserved"
        )

    def text(self, top: int = 5) -> str:
        """The tables in a few lines, for a record."""
        lines = [self.headline()]
        for column in COLUMNS:
            rows, rest = leading(self.rows(column, top), top)
            parts = [f"{size(size_bytes)} {name}" for name, size_bytes in rows]
            parts += [f"{size(rest.size_bytes)} ... and {rest.count} more"] if rest.count else []
            lines.append(f"by {column}: " + "; ".join(parts))
        largest, more = self.largest(top)
        for made, count in largest:
            times = f"{count} x " if count > 1 else ""
            who = f"{made.category}, {made.operator} in {made.module} at {made.line}: {made.text}"
            lines.append(f"largest: {times}{size(made.size_bytes)} {who}")
        return "\n".join([*lines, f"... and {more:,} more"] if more else lines)

    def to_dict(self, top: int = TOP) -> dict[str, Any]:
        """Plain containers, ready for JSON: every sum in full, the largest allocations."""
        return {
            "moment": self.name,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "allocations": len(self.allocations),
            "by": {column: by_size(self.by(column)) for column in COLUMNS},
            "largest": [{"count": count, **made._asdict()} for made, count in self.largest(top)[0]],
        }


@dataclass(frozen=True)
class Rest:
    """The rows that a table has no room for."""

    count: int
    size_bytes: int


def by_size(sums: Mapping[str, int]) -> dict[str, int]:
    """Largest first, whatever the sign; equal ones by name."""
    return dict(sorted(sums.items(), key=lambda item: (-abs(item[1]), item[0])))


def leading(sums: Mapping[str, int], top: int) -> tuple[list[tuple[str, int]], Rest]:
    """The largest rows, and what the others come to; a single other one is a row too."""
    rows = list(by_size(sums).items())
    rows = [row for row in rows if row[1]]
    if len(rows) == top + 1:
        top += 1
    return rows[:top], Rest(len(rows[top:]), sum(size_bytes for _, size_bytes in rows[top:]))


def folded(sums: Mapping[str, int]) -> dict[str, int]:
    """Sums by name, in which layers that repeat are one: `layers.*.mlp` for `layers.17.mlp` and its like."""
    together: Counter[str] = Counter()
    for name, size_bytes in sums.items():
        together[_folded(name)] += size_bytes
    return dict(together)


def _folded(name: str) -> str:
    return _INDEX.sub("*", name)
