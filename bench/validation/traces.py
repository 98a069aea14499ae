"""Allocator traces recorded on real cards, run through the simulator: every figure has to come out exactly."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.vgpu.allocator import Block, CachingAllocator

TRACES = Path(__file__).parents[2].parent / "shared" / "cases" / "allocator"
"""Where recorded traces lie beside a clone; they are not part of it."""

CAPACITY_BYTES = 80 * 2**30
"""None of the recorded runs came near the card's end."""


@dataclass(frozen=True)
class Replayed:
    """One recorded run.

    Attributes:
        name: Of its file.
        events: Allocations and releases.
        figures: Recorded and simulated, by what they are.
    """

    name: str
    events: int
    figures: dict[str, tuple[Any, Any]]

    @property
    def exact(self) -> bool:
        """Whether every figure came out."""
        return all(recorded == simulated for recorded, simulated in self.figures.values())


def replayed(folder: Path = TRACES) -> list[Replayed]:
    """Every trace in a folder, by name; none where there is no such folder."""
    return [replay(file) for file in sorted(folder.glob("*.json.gz"))]


def replay(file: Path) -> Replayed:
    """One trace: `events` of ["alloc", id, requested bytes, stream] and ["free", id], and what was `expected`."""
    trace = json.loads(gzip.decompress(file.read_bytes()))
    memory = CachingAllocator(CAPACITY_BYTES)
    live: dict[int, Block] = {}
    for event in trace["events"]:
        if event[0] == "alloc":
            live[event[1]] = memory.allocate(event[2], event[3])
        else:
            memory.free(live.pop(event[1]))
    simulated = {
        "segments": memory.segment_sizes(),
        "end_reserved_bytes": memory.reserved_bytes,
        "end_allocated_bytes": memory.allocated_bytes,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
    }
    figures = {name: (trace["expected"][name], value) for name, value in simulated.items()}
    return Replayed(file.name.removesuffix(".json.gz"), len(trace["events"]), figures)


def lines(traces: Sequence[Replayed]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of their table."""
    heads = ["recorded trace", "events", "peak allocated", "end reserved", "segments", "exact"]
    rows = [
        [
            trace.name,
            str(trace.events),
            _pair(trace.figures["peak_allocated_bytes"]),
            _pair(trace.figures["end_reserved_bytes"]),
            str(len(trace.figures["segments"][1])),
            "yes" if trace.exact else "MISS",
        ]
        for trace in traces
    ]
    return heads, rows


def _pair(figures: tuple[int, int]) -> str:
    recorded, simulated = figures
    return str(simulated) if recorded == simulated else f"{simulated} (recorded: {recorded})"
