"""What holds for the caching allocator whatever is asked of it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from allocator_programs import CAPACITY_BYTES, MIB, Operation, Program, configs, operations
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.vgpu.allocator import AllocatorConfig, CachingAllocator

checked = settings(max_examples=80, deadline=None, derandomize=True, database=None)


def program(config: AllocatorConfig) -> Program:
    return Program(lambda point: CachingAllocator(CAPACITY_BYTES, config=config, record_event=point))


def blocks_of(memory: CachingAllocator) -> list[dict[str, Any]]:
    return [block for segment in memory.snapshot() for block in segment["blocks"]]


@checked
@given(configs, operations)
def test_blocks_tile_their_segments_and_never_overlap(config: AllocatorConfig, ops: list[Operation]) -> None:
    run = program(config)
    for op in ops:
        run.do(op)
        end = 0
        for segment in run.allocator.snapshot():
            at = segment["address"]
            assert at >= end
            for block in segment["blocks"]:
                assert block["address"] == at
                assert block["size"] > 0
                assert block["size"] % 512 == 0
                at += block["size"]
            end = segment["address"] + segment["total_size"]
            assert at == end
        used = {b["address"]: b for b in blocks_of(run.allocator) if b["state"] == "active_allocated"}
        assert len(used) == len(run.live)
        for handle in run.live:
            block = used[handle.address]
            assert (handle.size_bytes, handle.requested_bytes) == (block["size"], block["requested_size"])
            assert handle.size_bytes >= handle.requested_bytes


@checked
@given(configs, operations)
def test_no_two_free_neighbours(config: AllocatorConfig, ops: list[Operation]) -> None:
    run = program(config)
    for op in ops:
        run.do(op)
        for segment in run.allocator.snapshot():
            states = [block["state"] for block in segment["blocks"]]
            assert ("inactive", "inactive") not in list(pairwise(states))


@checked
@given(configs, operations)
def test_sums_equal_the_counters_and_stay_within_the_capacity(config: AllocatorConfig, ops: list[Operation]) -> None:
    run = program(config)
    memory = run.allocator
    limit_bytes = int(CAPACITY_BYTES * config.per_process_memory_fraction)
    for op in ops:
        run.do(op)
        stats = memory.stats()
        segments = memory.snapshot()
        assert memory.allocated_bytes == sum(block.size_bytes for block in run.live)
        assert memory.allocated_bytes == sum(s["allocated_size"] for s in segments)
        assert memory.reserved_bytes == sum(s["total_size"] for s in segments) <= limit_bytes
        assert memory.free_bytes == CAPACITY_BYTES - memory.reserved_bytes
        assert stats["active_bytes.all.current"] == sum(s["active_size"] for s in segments)
        assert stats["requested_bytes.all.current"] == sum(s["requested_size"] for s in segments)
        assert stats["allocation.all.current"] == len(run.live)
        assert stats["num_ooms"] == run.refused <= stats["num_alloc_retries"]
        for name in stats:
            stat, _, metric = name.rpartition(".")
            if metric == "peak":
                assert stats[name] >= stats[f"{stat}.current"] >= 0
            if metric == "freed":
                assert stats[f"{stat}.allocated"] - stats[name] == stats[f"{stat}.current"]
            if ".all." in name and metric != "peak":
                assert stats[name] == sum(stats[name.replace(".all.", f".{pool}_pool.")] for pool in ("small", "large"))


def from_snapshot(memory: CachingAllocator) -> Counter[str]:
    """Current values of the counters, counted anew."""
    now: Counter[str] = Counter()
    for segment in memory.snapshot():
        expandable = segment["is_expandable"]
        whole = len(segment["blocks"]) == 1
        for pool in ("all", f"{segment['segment_type']}_pool"):
            now[f"segment.{pool}"] += not expandable
            now[f"reserved_bytes.{pool}"] += segment["total_size"]
            for block in segment["blocks"]:
                used = block["state"] == "active_allocated"
                free = block["state"] == "inactive"
                split = free and not whole and not expandable
                now[f"allocation.{pool}"] += used
                now[f"active.{pool}"] += not free
                now[f"inactive_split.{pool}"] += split
                now[f"allocated_bytes.{pool}"] += used * block["size"]
                now[f"active_bytes.{pool}"] += (not free) * block["size"]
                now[f"requested_bytes.{pool}"] += (not free) * block["requested_size"]
                now[f"inactive_split_bytes.{pool}"] += split * block["size"]
    return now


@checked
@given(configs, operations)
def test_counters_follow_from_the_snapshots(config: AllocatorConfig, ops: list[Operation]) -> None:
    run = program(config)
    peaks: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    before: Counter[str] = Counter()
    waited = False
    for index, op in enumerate(ops):
        if index == 30:
            run.allocator.reset_peak_stats()
            run.allocator.reset_accumulated_stats()
            peaks, sums = Counter(before), Counter()
        run.do(op)
        waited = waited or bool(run.points)
        now = from_snapshot(run.allocator)
        stats = run.allocator.stats()
        for name, value in now.items():
            peaks[name] = max(peaks[name], value)
            sums[name] += max(value - before[name], 0)
            assert stats[f"{name}.current"] == value
            # one call may return blocks that waited, release segments and take one again: then a peak or a sum can
            # pass unseen between two snapshots
            if not (waited and name.startswith("inactive_split")):
                assert stats[f"{name}.peak"] == peaks[name]
            if not waited and not name.startswith(("segment", "reserved")):
                assert stats[f"{name}.allocated"] == sums[name]
        for name in set(before) - set(now):
            assert stats[f"{name}.current"] == 0
        before = now


@checked
@given(configs, operations)
def test_nothing_stays_reserved_once_all_is_freed(config: AllocatorConfig, ops: list[Operation]) -> None:
    run = program(config)
    for op in ops:
        run.do(op)
    while run.live:
        run.allocator.free(run.live.pop())
    run.allocator.empty_cache()
    assert run.allocator.reserved_bytes == 0
    assert run.allocator.allocated_bytes == 0
    assert run.allocator.snapshot() == []
    stats = run.allocator.stats()
    assert {name: value for name, value in stats.items() if name.endswith(".current") and value} == {}


@checked
@given(configs, operations)
def test_equal_events_give_equal_bytes_and_addresses(config: AllocatorConfig, ops: list[Operation]) -> None:
    runs = [program(config), program(config)]
    for run in runs:
        for op in ops:
            run.do(op)
    one, two = runs
    assert [block.address for block in one.live] == [block.address for block in two.live]
    assert one.allocator.snapshot() == two.allocator.snapshot()
    assert one.allocator.stats() == two.allocator.stats()
    assert one.allocator.segment_sizes() == two.allocator.segment_sizes()


@checked
@given(st.integers(1, 2**40), st.sampled_from([0, 1, 2, 4, 8, 16]))
def test_rounding_is_least_and_stable(requested: int, divisions: int) -> None:
    config = AllocatorConfig(roundup_power2_divisions=divisions)
    rounded = config.rounded(requested)
    assert rounded >= requested
    assert rounded % 512 == 0
    assert config.rounded(rounded) == rounded
    segment = config.segment_bytes(rounded)
    assert segment >= rounded
    assert segment % (2 * MIB) == 0
    if divisions > 1 and requested > 512 * divisions:
        step = (1 << requested.bit_length() - 1) // divisions
        assert rounded - requested < step
    else:
        assert rounded - requested < 512
