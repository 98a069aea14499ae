"""Reading the profiler's events: their order, and what is missing of them. Messages are stood in for, none is real."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.bfc import Event
from bench.tf.allocations import BrokenTrace, read_trace, trace_of

ALLOCATION, DEALLOCATION, OTHER = 1, 2, 3
NUMBERS = {"addr": 1, "requested_bytes": 2, "allocation_bytes": 3, "bytes_allocated": 4, "peak_bytes_in_use": 5}
TEXTS = {"allocator_name": 6, "tf_op": 7, "region_type": 8, "shape": 9}
WORDS = {20: "bfc", 21: "MatMul", 22: "output", 23: "[2,3]", 24: "other"}


def event(time_ns: int, kind: int, address: int, num_bytes: int, in_use: int, *, allocator: int = 20) -> Any:
    """An event of `num_bytes` requested, in a chunk rounded up to 256."""
    chunk_bytes = -(-num_bytes // 256) * 256
    values = zip(NUMBERS.values(), (address, num_bytes, chunk_bytes, in_use, in_use), strict=True)
    stats = [SimpleNamespace(metadata_id=number, int64_value=value, ref_value=0) for number, value in values]
    words = [("allocator_name", allocator)]
    if kind == ALLOCATION:
        words += [("tf_op", 21), ("region_type", 22), ("shape", 23)]
    stats += [SimpleNamespace(metadata_id=TEXTS[name], int64_value=0, ref_value=word) for name, word in words]
    return SimpleNamespace(metadata_id=kind, offset_ps=time_ns * 1000, stats=stats)


def space(*lines: list[Any], starts_ns: tuple[int, ...] = ()) -> Any:
    """A message with one host plane of these lines, one a thread."""
    kinds = {ALLOCATION: "MemoryAllocation", DEALLOCATION: "MemoryDeallocation", OTHER: "FunctionRun"}
    names = {number: name for name, number in (NUMBERS | TEXTS).items()} | WORDS
    starts = starts_ns or (0,) * len(lines)
    plane = SimpleNamespace(
        event_metadata={number: SimpleNamespace(name=name) for number, name in kinds.items()},
        stat_metadata={number: SimpleNamespace(name=name) for number, name in names.items()},
        lines=[SimpleNamespace(timestamp_ns=start, events=events) for start, events in zip(starts, lines, strict=True)],
    )
    return SimpleNamespace(planes=[plane])


def test_events_of_all_threads_by_time() -> None:
    first = [event(10, ALLOCATION, 1, 100, 256), event(30, DEALLOCATION, 2, 300, 256)]
    second = [event(15, ALLOCATION, 2, 300, 768)]
    trace = trace_of(space(first, second, starts_ns=(5, 5)), "bfc")
    assert [step.time_ps for step in trace.events] == [15_000, 20_000, 35_000]
    assert [step.address for step in trace.events] == [1, 2, 2]
    assert (trace.held, trace.unknown_bytes) == ((), 0)
    allocation, _, deallocation = trace.events
    assert (allocation.tf_op, allocation.region_type, allocation.shape) == ("MatMul", "output", "[2,3]")
    assert (deallocation.tf_op, deallocation.region_type, deallocation.shape) == ("", "", "")
    assert trace.replayable() == [Event(1, 100), Event(2, 300), Event(2, 0)]


def test_the_start_of_a_line_counts() -> None:
    early, late = [event(10, ALLOCATION, 1, 100, 256)], [event(5, ALLOCATION, 2, 100, 512)]
    trace = trace_of(space(late, early, starts_ns=(100, 0)), "bfc")
    assert [step.address for step in trace.events] == [1, 2]


def test_events_of_one_instant_are_put_so_that_they_add_up() -> None:
    first = [event(1, ALLOCATION, 1, 100, 256), event(7, DEALLOCATION, 2, 600, 256)]
    second = [event(7, ALLOCATION, 2, 600, 1024)]
    trace = trace_of(space(first, second), "bfc")
    assert [(step.allocates, step.address) for step in trace.events] == [(True, 1), (True, 2), (False, 2)]


def test_other_events_and_allocators_are_passed_over() -> None:
    other = SimpleNamespace(metadata_id=OTHER, offset_ps=0, stats=[])
    events = [other, event(1, ALLOCATION, 1, 100, 4096, allocator=24), event(2, ALLOCATION, 2, 100, 256)]
    assert [step.address for step in trace_of(space(events), "bfc").events] == [2]


def test_blocks_from_before_the_trace() -> None:
    events = [
        event(1, ALLOCATION, 9, 100, 2048 + 256),
        event(2, DEALLOCATION, 7, 1000, 1280),
        event(3, DEALLOCATION, 9, 100, 1024),
        event(4, DEALLOCATION, 5, 300, 512),
    ]
    trace = trace_of(space(events), "bfc")
    assert [(block.address, block.allocation_bytes) for block in trace.held] == [(5, 512), (7, 1024)]
    assert trace.unknown_bytes == 512
    assert trace.replayable()[:2] == [Event(5, 300), Event(7, 1000)]


def test_a_missing_event_is_found() -> None:
    events = [event(1, ALLOCATION, 1, 100, 256), event(3, ALLOCATION, 3, 100, 768)]
    with pytest.raises(BrokenTrace, match="event 1 found 512 bytes in use, the one before left 256"):
        trace_of(space(events), "bfc")


def test_more_from_before_than_there_was() -> None:
    events = [event(1, DEALLOCATION, 1, 100, 0), event(2, ALLOCATION, 2, 100, 256), event(3, DEALLOCATION, 9, 100, 0)]
    with pytest.raises(BrokenTrace, match="256 bytes more than were in use"):
        trace_of(space(events), "bfc")


def test_a_trace_without_the_allocator() -> None:
    with pytest.raises(BrokenTrace, match="no event of an allocator bfc"):
        trace_of(space([]), "bfc")


def test_the_file_has_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.xplane.pb").touch()
    with pytest.raises(BrokenTrace, match="2 traces"):
        read_trace(tmp_path)
