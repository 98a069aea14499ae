"""Replays: as recorded, the bytes come back; otherwise, what the allocator would have done."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from allocator_programs import CAPACITY_BYTES, CONFIGS, Operation, Point, Program, configs, operations
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_tools import MIB, Recording, event, segment, write
from snapshot_tools import block as block_of

from bench import replay as replay_module
from bench.errors import BadInput
from bench.replay import Outcome, replay
from bench.snapshot import Snapshot, snapshot_of
from bench.vgpu.allocator import AllocatorConfig, CachingAllocator, OutOfMemory
from bench.what_if import own_configuration, plan_of, what_if

TRACES = sorted((Path(__file__).parents[1] / "vgpu" / "traces").glob("*.json.gz"))
checked = settings(max_examples=120, deadline=None, derandomize=True, database=None)


class RecordedProgram(Program):
    """A program whose allocator is a recording's."""

    def __init__(self, config: AllocatorConfig, capacity_bytes: int = CAPACITY_BYTES) -> None:
        super().__init__(lambda point: self._record(capacity_bytes, config, point))

    def _record(self, capacity_bytes: int, config: AllocatorConfig, point: Callable[[int], Point]) -> CachingAllocator:
        self.recording = Recording(capacity_bytes, config, record_event=point)
        return self.recording.allocator


def own_replay(snapshot: Snapshot) -> Outcome:
    plan, _ = plan_of(snapshot)
    return replay(plan)


@checked
@given(configs, operations)
def test_as_it_was_configured_every_byte_comes_back(config: AllocatorConfig, operations: list[Operation]) -> None:
    program = RecordedProgram(config)
    with program.recording.running():
        program.run(operations)
        snapshot = program.recording.snapshot()
    outcome = own_replay(snapshot)
    allocator = program.allocator
    assert outcome.unmatched == outcome.served == 0
    if outcome.failure is None:  # else the last request failed, and nothing came after it
        assert outcome.end_reserved_bytes == allocator.reserved_bytes == snapshot.reserved_bytes
        assert outcome.end_allocated_bytes == allocator.allocated_bytes == snapshot.allocated_bytes
    assert outcome.peak_reserved_bytes == allocator.peak_reserved_bytes
    assert outcome.peak_allocated_bytes == allocator.peak_allocated_bytes
    assert outcome.retries >= allocator.num_alloc_retries  # empty_cache() before a request looks like one


@checked
@given(operations)
def test_where_the_cards_size_is_not_known_releases_are_repeated(operations: list[Operation]) -> None:
    program = RecordedProgram(AllocatorConfig())
    with program.recording.running():
        program.run([each for each in operations if each[0] != "record"])
        snapshot = program.recording.snapshot(knows_capacity=False)
    if any(each.action == "oom" for each in snapshot.events):
        return  # then it is
    outcome = own_replay(snapshot)
    assert outcome.unmatched == 0
    assert outcome.peak_reserved_bytes == program.allocator.peak_reserved_bytes
    assert outcome.end_reserved_bytes == program.allocator.reserved_bytes


@checked
@given(st.sampled_from(["default", "max_split", "rounding"]).map(CONFIGS.__getitem__), operations, operations)
def test_a_trace_that_begins_within_a_run_starts_from_what_was_there(
    config: AllocatorConfig, before: list[Operation], after: list[Operation]
) -> None:
    program = RecordedProgram(config)
    program.run([each for each in before if each[0] != "record"])
    program.allocator.reset_peak_stats()
    start_bytes = program.allocator.allocated_bytes
    with program.recording.running():
        program.run(after)
        snapshot = program.recording.snapshot()
    plan, _ = plan_of(snapshot)
    outcome = replay(plan)
    assert plan.start.contradictions == outcome.unmatched == 0
    if sum(block.size_bytes for block in plan.start.blocks) != start_bytes:
        assert plan.start.derived  # an unsplit remainder before a free block
        return
    assert outcome.peak_reserved_bytes == program.allocator.peak_reserved_bytes
    assert outcome.peak_allocated_bytes == program.allocator.peak_allocated_bytes
    if outcome.failure is None:
        assert outcome.end_reserved_bytes == program.allocator.reserved_bytes
        assert outcome.end_allocated_bytes == program.allocator.allocated_bytes


@checked
@given(operations, st.booleans())
def test_with_expandable_segments_reserved_is_in_whole_pages(operations: list[Operation], only_large: bool) -> None:
    program = RecordedProgram(AllocatorConfig(), capacity_bytes=2**40)
    with program.recording.running():
        program.run([each for each in operations if not only_large or each[0] != "allocate" or each[1] > MIB])
        snapshot = program.recording.snapshot()
    plan, _ = plan_of(snapshot)
    outcome = replay(dataclasses.replace(plan, config=CONFIGS["expandable"], own=False))
    page_bytes = 20 * MIB if only_large else 2 * MIB
    assert outcome.peak_reserved_bytes % page_bytes == 0
    assert outcome.end_reserved_bytes % page_bytes == 0
    assert outcome.peak_allocated_bytes <= program.allocator.peak_allocated_bytes  # no remainder stays unsplit


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.partition(".")[0])
def test_published_traces_come_back_from_a_snapshot(path: Path, tmp_path: Path) -> None:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    recording = Recording()
    live = {}
    with recording.running():
        for step in trace["events"]:
            if step[0] == "alloc":
                live[step[1]] = recording.allocator.allocate(step[2], step[3])
            else:
                recording.allocator.free(live.pop(step[1]))
        file = write(tmp_path / "trace.pickle", recording.content(knows_capacity=False))
    replays = what_if(file, None, None, None)
    assert replays.own.end_reserved_bytes == trace["expected"]["end_reserved_bytes"]
    assert replays.own.end_allocated_bytes == trace["expected"]["end_allocated_bytes"]
    assert replays.own.peak_allocated_bytes == trace["expected"]["peak_allocated_bytes"]
    assert (replays.asked, replays.remarks) == (None, [])


def test_a_smaller_card_runs_out_where_it_would_have(tmp_path: Path) -> None:
    recording = Recording()
    with recording.running():
        blocks = [recording.allocator.allocate(2**30) for _ in range(20)]
        recording.allocator.free(blocks[0])
        file = write(tmp_path / "big.pickle", recording.content())
    replays = what_if(file, None, "k80", None)
    assert replays.own.failure is None
    assert replays.asked is not None
    assert replays.asked.failure is not None
    assert replays.asked.failure.reserved_bytes == 10 * 2**30
    assert replays.asked.failure.tried_bytes == 2**30
    assert replays.asked.events == 21  # ten segments with a block each, and one more segment
    assert what_if(file, None, "h100", None).asked.failure is None  # type: ignore[union-attr]


def test_a_recorded_failure_tells_how_much_the_card_has(tmp_path: Path) -> None:
    recording = Recording(100 * MIB)
    with recording.running():
        small = [recording.allocator.allocate(6 * MIB) for _ in range(15)]  # three in each segment of 20 MiB
        for block in small[::2]:
            recording.allocator.free(block)
        with pytest.raises(OutOfMemory):
            recording.allocator.allocate(24 * MIB)
        file = write(tmp_path / "oom.pickle", recording.content(knows_capacity=False))
    replays = what_if(file, "expandable_segments:True", None, None)
    assert replays.recorded.capacity_bytes == replays.capacity_bytes == 100 * MIB
    assert replays.own.failure is not None
    assert replays.own.retries == 1
    assert replays.asked is not None
    # 15 x 6 MiB end to end take 100 MiB too, of which nothing can be released: it does not help here
    assert replays.asked.failure is not None
    assert what_if(file, None, "k80", None).asked.served == 1  # type: ignore[union-attr]


def test_what_waits_for_another_stream_waits_in_the_replay_too() -> None:
    program = RecordedProgram(AllocatorConfig())
    allocator = program.allocator
    with program.recording.running():
        first = allocator.allocate(30 * MIB)
        allocator.record_stream(first, 1)
        allocator.free(first)
        second = allocator.allocate(30 * MIB)  # the first is not free yet
        program.points[0].done = True
        allocator.free(second)
        allocator.allocate(30 * MIB)
        snapshot = program.recording.snapshot()
    outcome = own_replay(snapshot)
    assert outcome.peak_reserved_bytes == outcome.end_reserved_bytes == 60 * MIB
    assert outcome.end_allocated_bytes == 30 * MIB


def test_memory_pools_do_not_share() -> None:
    frees = [event("free_requested", 2**40, 30 * MIB), event("free_completed", 2**40, 30 * MIB)]
    trace = [event("segment_alloc", 2**40, 30 * MIB), event("alloc", 2**40, 30 * MIB), *frees]
    other = [event("segment_alloc", 2**41, 30 * MIB), event("alloc", 2**41, 30 * MIB)]
    for each in other:
        each["pool_id"] = (1, 0)
    second = segment(2**41, block_of(2**41, 30 * MIB, 30 * MIB))
    content = {"segments": [segment(2**40, block_of(2**40, 30 * MIB, 0)), second], "device_traces": [[*trace, *other]]}
    snapshot = snapshot_of("pools", content)
    assert own_replay(snapshot).end_reserved_bytes == 60 * MIB


def test_a_trace_that_does_not_fit_its_segments_is_said_to_be_inexact(tmp_path: Path) -> None:
    trace: list[dict[str, Any]] = [event("free_requested", 5, 10), event("alloc", 2**40, 3 * MIB)]
    replays = what_if(write(tmp_path / "odd.pickle", {"segments": [], "device_traces": [trace]}), None, None, None)
    assert any("do not fit the segments" in remark for remark in replays.remarks)
    assert any("does not come out as recorded" in remark for remark in replays.remarks)


def test_more_blocks_than_can_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "MAX_LIVE", 3)
    trace = [event("alloc", 2**40 + 512 * number, 512) for number in range(4)]
    path = write(tmp_path / "many.pickle", {"segments": [], "device_traces": [trace]})
    with pytest.raises(BadInput, match=r"many\.pickle is refused: more than 3 blocks live at once"):
        what_if(path, None, None, None)


def test_segments_beyond_the_card_are_refused(tmp_path: Path) -> None:
    content = {
        "segments": [segment(2**40, block_of(2**40, 30 * MIB, 30 * MIB))],
        "device_traces": [[event("snapshot", 0, 0)]],
        "virtual_gpu": {"target": "test", "capacity_bytes": 20 * MIB},
    }
    with pytest.raises(BadInput, match="its trace does not lead to its segments: no room"):
        what_if(write(tmp_path / "large.pickle", content), None, None, None)


def test_blocks_that_overlap_are_refused(tmp_path: Path) -> None:
    frees = [event("free_requested", 2**40 + 600, 9000), event("free_completed", 2**40 + 600, 9000)]
    held = segment(2**40, block_of(2**40, 5120, 5120), block_of(2**40 + 5120, 2 * MIB - 5120, 0))
    path = write(tmp_path / "odd.pickle", {"segments": [held], "device_traces": [frees]})
    with pytest.raises(BadInput, match="do not fill it"):
        what_if(path, None, None, None)


@pytest.mark.parametrize(
    ("settings_", "config", "remark"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, AllocatorConfig(max_split_size_bytes=64 * MIB), ""),
        (
            {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": 64 * MIB,
                "garbage_collection_threshold": 0.5,
                "expandable_segments": True,
                "roundup_power2_divisions": {str(1 << i): 2 for i in range(16)},
            },
            AllocatorConfig(64 * MIB, (2,) * 16, 0.5, True),
            "",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "colour:\x1b[31mred"}, AllocatorConfig(), "of the form key:value"),
        ({"max_split_size": "big"}, AllocatorConfig(), "not a number"),
        ({}, AllocatorConfig(), "does not say how its allocator was configured"),
    ],
)
def test_the_recordings_configuration_is_read(settings_: dict[str, Any], config: AllocatorConfig, remark: str) -> None:
    found, remarks = own_configuration(snapshot_of("s", {"segments": [], "allocator_settings": settings_}))
    assert found == config
    assert [remark in each for each in remarks] == [True] * bool(remark)
    assert "\x1b" not in "".join(remarks)


def test_a_configuration_is_written_as_it_is_read() -> None:
    for text in ("", "expandable_segments:True", "garbage_collection_threshold:0.5,max_split_size_mb:64"):
        assert AllocatorConfig.parse(text).text() == text
    config = AllocatorConfig.parse("roundup_power2_divisions:[256:1,512:2,>:4]")
    assert AllocatorConfig.parse(config.text()) == config
