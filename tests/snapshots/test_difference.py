"""What is printed of moments, differences and replays, and that every column adds up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from snapshot_tools import MIB, Recording, block, event, frame, segment, write

from bench.difference import Difference, moment_of
from bench.moment import COLUMNS, Moment, leading
from bench.show_memory import print_difference, print_moment, print_replays
from bench.snapshot import snapshot_of
from bench.vgpu.allocator import OutOfMemory
from bench.vgpu.attribution import Allocation
from bench.what_if import what_if

Golden = Callable[[str, str], None]
GIB = 2**30


def made(size_bytes: int, category: str, module: str, operator: str = "aten.mm.default", line: int = 1) -> Allocation:
    return Allocation(size_bytes, category, module, operator, f"model.py:{line} in forward", "y = x @ w")


def layers(count: int, size_bytes: int) -> list[Allocation]:
    return [made(size_bytes, "activations", f"model.layers.{number}.mlp", line=7) for number in range(count)]


BEFORE = Moment(
    "peak of a step",
    3 * GIB,
    [
        *layers(12, 128 * MIB),
        made(64 * MIB, "parameters", "model.embedding", "aten._to_copy.default", 20),
        made(32 * MIB, "workspace", "model.layers.0.mlp", line=7),
        made(512, "temporaries", "(outside modules)", "aten.sum.default", 30),
    ],
)
AFTER = Moment(
    "out of memory",
    4 * GIB,
    [
        *layers(14, 192 * MIB),
        made(64 * MIB, "parameters", "model.embedding", "aten._to_copy.default", 20),
        made(16 * MIB, "gradients", "model.embedding", "aten.embedding_dense_backward.default", 20),
        made(512, "temporaries", "(outside modules)", "aten.sum.default", 30),
    ],
)


def printed(show: Callable[..., None], *arguments: Any) -> str:
    console = Console(width=160, markup=False, highlight=False, force_terminal=False)
    with console.capture() as capture:
        show(console, *arguments)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def test_a_moment_in_tables(golden: Golden) -> None:
    golden("moment.txt", printed(print_moment, BEFORE, 3))


def test_a_moment_in_a_few_lines(golden: Golden) -> None:
    golden("moment_text.txt", BEFORE.text(top=2) + "\n")


def test_a_difference_in_tables(golden: Golden) -> None:
    difference = Difference(BEFORE, AFTER, ("before.pickle", "after.pickle"), ["a remark"])
    golden("difference.txt", printed(print_difference, difference, 3))


def test_no_change_is_said() -> None:
    same = Difference(BEFORE, BEFORE, ("one", "two"), [])
    assert "B - A: 0 allocated" in printed(print_difference, same, 3)
    assert same.to_dict()["by"] == {column: {} for column in COLUMNS}


def test_replays_in_a_table(golden: Golden, tmp_path: Path) -> None:
    recording = Recording(100 * MIB)
    with recording.running():
        kept = [recording.allocator.allocate(6 * MIB) for _ in range(9)]
        for each in kept[::3]:
            recording.allocator.free(each)
        recording.allocator.empty_cache()
        with pytest.raises(OutOfMemory):
            recording.allocator.allocate(50 * MIB)
        content = recording.content()
    content["device_traces"][0][-1]["frames"] = [frame("/home/me/train.py", 12, "step")]
    path = write(tmp_path / "run.pickle", content)
    golden("replay.txt", printed(print_replays, what_if(path, "max_split_size_mb:64", None, None)))
    golden("replay_own.txt", printed(print_replays, what_if(path, None, None, None)))


names = st.sampled_from(["a", "b.0", "b.1", "b.2", "c", "(outside modules)"])
allocations = st.lists(
    st.builds(Allocation, st.integers(1, 10**6), names, names, names, names, st.just("")), max_size=30
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(allocations, allocations, st.integers(1, 4))
def test_every_column_adds_up(before: list[Allocation], after: list[Allocation], top: int) -> None:
    first, second = Moment("x", 0, before), Moment("y", 0, after)
    difference = Difference(first, second, ("A", "B"), [])
    for column in COLUMNS:
        assert sum(first.by(column).values()) == sum(first.rows(column, top).values()) == first.allocated_bytes
        assert sum(difference.by(column).values()) == difference.allocated_bytes
        rows, rest = leading(difference.by(column), top)
        assert sum(size for _, size in rows) + rest.size_bytes == difference.allocated_bytes
        assert rest.count != 1
        sizes = [abs(size) for _, size in rows]
        assert sizes == sorted(sizes, reverse=True)
    largest, more = first.largest(top)
    assert sum(count for _, count in largest) + more == len(before)


def test_snapshots_are_compared_at_their_peaks_or_ends() -> None:
    stack = [frame("/home/me/train.py", 12, "step")]
    kept = block(2**40, 3 * MIB, 3 * MIB, stack, category="parameters")
    free = block(2**40 + 3 * MIB, 17 * MIB, 0)
    at = 2**40 + 3 * MIB
    trace = [
        event("segment_alloc", 2**40, 20 * MIB),
        event("alloc", 2**40, 3 * MIB, stack) | {"category": "parameters"},
        event("alloc", at, 5 * MIB, stack) | {"category": "activations"},
        event("free_requested", at, 5 * MIB),
        event("free_completed", at, 5 * MIB),
    ]
    snapshot = snapshot_of("s", {"segments": [segment(2**40, kept, free)], "device_traces": [trace]})
    assert moment_of(snapshot, "peak").by("category") == {"activations": 5 * MIB, "parameters": 3 * MIB}
    assert moment_of(snapshot, "end").by("category") == {"parameters": 3 * MIB}
    assert moment_of(snapshot, "end").by("line") == {"/home/me/train.py:12 in step": 3 * MIB}
