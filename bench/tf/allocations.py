"""Reads what TensorFlow's profiler recorded of a BFC allocator, in the order in which it happened.

With TF_CPU_ALLOCATOR_USE_BFC=1 the CPU's tensors come from `BFCAllocator`, which tells the profiler of every
allocation and deallocation (`AddTraceMe` in xla/tsl/framework/bfc_allocator.cc). The profiler keeps these in queues
without an end, one a thread (`ThreadLocalRecorder` in xla/tsl/profiler/backends/cpu/traceme_recorder.cc): none is
dropped. The time of an event is taken while the allocator is locked, in whole nanoseconds, so that times give the
order over all threads, except between threads within one nanosecond. Both are checked: bytes of consecutive events
have to add up.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.bfc import Event

CPU_ALLOCATOR: Final = "bfc_cpu_allocator_for_gpu"
"""Name of the CPU's BFC allocator (tensorflow/core/common_runtime/process_state.cc)."""

_KINDS: Final = {"MemoryAllocation": True, "MemoryDeallocation": False}


class BrokenTrace(ValueError):
    """Events are missing, or the file holds no trace of the allocator; the message is one line."""


class Allocation(NamedTuple):
    """An allocation or a deallocation.

    Attributes:
        time_ps: Since the profiler began.
        allocates: Whether it is an allocation.
        address: Of the block.
        requested_bytes: What the block was asked for with.
        allocation_bytes: What it takes: its chunk.
        bytes_allocated: In use after the event, in chunks.
        peak_bytes_in_use: Highest so far, or since `reset_memory_stats`.
        tf_op: Operation that asked; empty where none was running, and of deallocations.
        region_type: What for: `output`, `temp`, `persist`, or empty.
        shape: Of the tensor, such as `[64,10]`, or empty.
    """

    time_ps: int
    allocates: bool
    address: int
    requested_bytes: int
    allocation_bytes: int
    bytes_allocated: int
    peak_bytes_in_use: int
    tf_op: str
    region_type: str
    shape: str

    @property
    def bytes_before(self) -> int:
        """In use before the event, in chunks."""
        return self.bytes_allocated + (-self.allocation_bytes if self.allocates else self.allocation_bytes)


@dataclass(frozen=True)
class Trace:
    """All events of one allocator while the profiler ran.

    Attributes:
        events: In the order in which they happened.
        held: The deallocations among them of blocks that were there before the first event, by address.
        unknown_bytes: In chunks, of blocks that were there before the first event and after the last: nothing else is
            known of them.
    """

    events: tuple[Allocation, ...]
    held: tuple[Allocation, ...]
    unknown_bytes: int

    def replayable(self) -> list[Event]:
        """The events for `bench.bfc.replay`: first the blocks held before, by address; unknown ones are left out."""
        before = [Event(block.address, block.requested_bytes) for block in self.held]
        return before + [Event(event.address, event.requested_bytes * event.allocates) for event in self.events]


def read_trace(path: Path, allocator_name: str = CPU_ALLOCATOR) -> Trace:
    """The trace in a `.xplane.pb` file, or in the one such file below a folder; loads TensorFlow for the format.

    Raises:
        FileNotFoundError: No such file.
        BrokenTrace: Several files in the folder, no event of the allocator, or events missing.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"no .xplane.pb in {path}")
    if len(files) > 1:
        raise BrokenTrace(f"{len(files)} traces in {path}: name one")
    # by name: the package is no dependency, and has no types
    space = importlib.import_module("tensorflow.tsl.profiler.protobuf.xplane_pb2").XSpace()
    space.ParseFromString(files[0].read_bytes())
    return trace_of(space, allocator_name)


def trace_of(space: Any, allocator_name: str = CPU_ALLOCATOR) -> Trace:
    """The events of one allocator in an `XSpace` message.

    Raises:
        BrokenTrace: No event of the allocator, or events missing.
    """
    found = [event for plane in space.planes for event in _events(plane, allocator_name)]
    if not found:
        raise BrokenTrace(f"the trace has no event of an allocator {allocator_name}")
    events = in_order(found)
    held = _held(events)
    unknown_bytes = events[0].bytes_before - sum(block.allocation_bytes for block in held)
    if unknown_bytes < 0:
        raise BrokenTrace(f"blocks from before the trace have {-unknown_bytes} bytes more than were in use")
    return Trace(tuple(events), tuple(held), unknown_bytes)


def in_order(events: Iterable[Allocation]) -> list[Allocation]:
    """Events by time, those of one instant so that their bytes add up.

    Raises:
        BrokenTrace: Bytes of two consecutive events do not add up: there was something between them.
    """
    ordered: list[Allocation] = []
    for _, group in groupby(sorted(events, key=_time), key=_time):
        instant = list(group)
        while instant:
            following = instant[0]
            if ordered:
                in_use = ordered[-1].bytes_allocated
                fitting = (event for event in instant if event.bytes_before == in_use)
                following = next(fitting, following)
                if following.bytes_before != in_use:
                    raise BrokenTrace(
                        f"event {len(ordered)} found {following.bytes_before} bytes in use, "
                        f"the one before left {in_use}: events are missing"
                    )
            instant.remove(following)
            ordered.append(following)
    return ordered


def _time(event: Allocation) -> int:
    return event.time_ps


def _held(events: list[Allocation]) -> list[Allocation]:
    """Deallocations without an allocation before them, by address."""
    live: set[int] = set()
    held = []
    for event in events:
        if event.allocates:
            live.add(event.address)
        elif event.address in live:
            live.remove(event.address)
        else:
            held.append(event)
    return sorted(held, key=lambda event: event.address)


def _events(plane: Any, allocator_name: str) -> Iterable[Allocation]:
    """Events of one allocator in an `XPlane`, thread by thread."""
    kinds = {number: _KINDS[meta.name] for number, meta in plane.event_metadata.items() if meta.name in _KINDS}
    names = {number: meta.name for number, meta in plane.stat_metadata.items()}
    for line in plane.lines:
        start_ps = line.timestamp_ns * 1000
        for event in line.events:
            if event.metadata_id not in kinds:
                continue
            stats = {names[stat.metadata_id]: stat for stat in event.stats}
            if _text(stats, "allocator_name", names) != allocator_name:
                continue
            yield Allocation(
                start_ps + event.offset_ps,
                kinds[event.metadata_id],
                stats["addr"].int64_value,
                stats["requested_bytes"].int64_value,
                stats["allocation_bytes"].int64_value,
                stats["bytes_allocated"].int64_value,
                stats["peak_bytes_in_use"].int64_value,
                _text(stats, "tf_op", names),
                _text(stats, "region_type", names),
                _text(stats, "shape", names),
            )


def _text(stats: dict[str, Any], name: str, names: dict[int, str]) -> str:
    """A text among the stats of an event, which refers to the table of names; empty if there is none."""
    stat = stats.get(name)
    return names.get(stat.ref_value, "") if stat is not None else ""
