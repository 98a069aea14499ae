"""What changed between two moments, by category, module, operator and source line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.errors import BadInput
from bench.frames import made
from bench.moment import COLUMNS, Moment, by_size
from bench.replay import CannotReplay, replay
from bench.snapshot import ALLOCATED, Snapshot
from bench.what_if import plan_of

MOMENTS = ("peak", "end")


@dataclass(frozen=True)
class Difference:
    """Two moments, the second compared with the first.

    Attributes:
        before: What the first occupied.
        after: What the second occupied.
        names: What they are of.
        remarks: What a reader must know of how they were got.
    """

    before: Moment
    after: Moment
    names: tuple[str, str]
    remarks: list[str]

    @property
    def allocated_bytes(self) -> int:
        """What `by` adds up to."""
        return self.after.allocated_bytes - self.before.allocated_bytes

    def by(self, column: str) -> dict[str, int]:
        """Bytes more by what one of `COLUMNS` holds, unchanged ones left out; biggest change first."""
        before, after = self.before.by(column), self.after.by(column)
        return by_size({n: d for n in before | after if (d := after.get(n, 0) - before.get(n, 0))})

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        sides = zip(self.names, (self.before, self.after), strict=True)
        return {
            "sides": [
                {
                    "name": name,
                    "moment": m.name,
                    "allocated_bytes": m.allocated_bytes,
                    "reserved_bytes": m.reserved_bytes,
                }
                for name, m in sides
            ],
            "allocated_bytes": self.allocated_bytes,
            "by": {column: self.by(column) for column in COLUMNS},
            "remarks": self.remarks,
        }


def moment_of(snapshot: Snapshot, at: str) -> Moment:
    """What a snapshot's blocks were at the "peak" since its trace begins, or at the "end".

    Raises:
        BadInput: Its trace is refused.
    """
    if at == "end" or not snapshot.events:
        blocks = [(b.entry, b.size_bytes) for s in snapshot.segments for b in s.blocks if b.state == ALLOCATED]
        return _moment("end", snapshot.reserved_bytes, blocks)
    plan, _ = plan_of(snapshot)
    try:
        whole = replay(plan)
        peak = replay(plan, stop_after=whole.peak_allocated_at)
    except CannotReplay as error:
        raise BadInput(f"{snapshot.name} is refused: {error}") from error
    return _moment("peak", whole.peak_reserved_bytes, [(entry, block.size_bytes) for block, entry in peak.live])


def _moment(name: str, reserved_bytes: int, blocks: list[tuple[dict[str, Any], int]]) -> Moment:
    allocations = [made(entry, size_bytes) for entry, size_bytes in blocks]
    return Moment(name, reserved_bytes, sorted(allocations, key=lambda each: (-each.size_bytes, *each[1:])))
