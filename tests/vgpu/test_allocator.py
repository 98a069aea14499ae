"""Every rule of the caching allocator, and recorded runs of real cards."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from bench.validation.traces import TRACES, replay
from bench.vgpu.allocator import AllocatorConfig, CachingAllocator, OutOfMemory

MIB = 2**20
GIB = 2**30

OWN_TRACES = Path(__file__).parent / "traces"


def allocator(capacity_mib: int = 1024, **settings: Any) -> CachingAllocator:
    return CachingAllocator(capacity_mib * MIB, config=AllocatorConfig(**settings))


def layout(memory: CachingAllocator) -> list[list[tuple[str, int]]]:
    """State and bytes of each block, by segment."""
    short = {"inactive": "free", "active_allocated": "used", "active_pending_free": "wait"}
    return [[(short[b["state"]], b["size"]) for b in segment["blocks"]] for segment in memory.snapshot()]


class Event:
    """A point in a stream's work that is passed when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.waited = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited += 1


class Streams:
    """Records events, and keeps them by stream."""

    def __init__(self) -> None:
        self.events: list[tuple[int, Event]] = []

    def record(self, stream: int) -> Event:
        event = Event()
        self.events.append((stream, event))
        return event


# Recorded runs


def trace_files() -> list[Any]:
    files = sorted(OWN_TRACES.glob("*.json.gz"))
    params: list[Any] = [pytest.param(file, id=f"own-{file.name}") for file in files]
    if TRACES.is_dir():
        shared = sorted(TRACES.glob("*.json.gz"))
        params += [pytest.param(file, id=file.name) for file in shared]
    else:
        params.append(pytest.param(None, id="shared", marks=pytest.mark.skip(reason=f"{TRACES} is absent")))
    return params


@pytest.mark.parametrize("file", trace_files())
def test_recorded_run_is_reproduced(file: Path) -> None:
    for name, (recorded, simulated) in replay(file).figures.items():
        assert simulated == recorded, name


# Sizes


@pytest.mark.parametrize(
    ("requested", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (MIB - 1, MIB)]
)
def test_requests_are_rounded_up_to_512_bytes(requested: int, block: int) -> None:
    memory = allocator()
    taken = memory.allocate(requested)
    assert (taken.size_bytes, taken.requested_bytes) == (block, requested)
    assert memory.allocated_bytes == block
    assert memory.stats()["requested_bytes.all.current"] == requested


@pytest.mark.parametrize(
    ("requested", "segment", "pool"),
    [
        (1, 2 * MIB, "small"),
        (MIB, 2 * MIB, "small"),
        (MIB + 1, 20 * MIB, "large"),
        (10 * MIB - 512, 20 * MIB, "large"),
        (10 * MIB - 511, 10 * MIB, "large"),
        (10 * MIB, 10 * MIB, "large"),
        (10 * MIB + 1, 12 * MIB, "large"),
        (33 * MIB, 34 * MIB, "large"),
    ],
)
def test_pool_and_segment_of_a_request(requested: int, segment: int, pool: str) -> None:
    memory = allocator()
    memory.allocate(requested)
    assert memory.segment_sizes() == [segment]
    assert memory.reserved_bytes == memory.peak_reserved_bytes == segment
    assert memory.stats()[f"segment.{pool}_pool.current"] == 1
    assert memory.snapshot()[0]["segment_type"] == pool


@pytest.mark.parametrize("requested", [0, -1])
def test_nothing_cannot_be_allocated(requested: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        allocator().allocate(requested)


@pytest.mark.parametrize(
    ("divisions", "requested", "block"),
    [
        (4, 1200, 1536),  # not over 512 * 4: up to 512
        (4, 2048, 2048),
        (4, 2049, 2560),
        (4, 4 * MIB, 4 * MIB),
        (4, 4 * MIB + 1, 5 * MIB),
        (4, 7 * MIB + 1, 8 * MIB),
        (1, 4 * MIB + 1, 4 * MIB + 512),
        (8, 4 * MIB + 1, 4 * MIB + MIB // 2),
    ],
)
def test_requests_are_rounded_to_divisions_of_a_power_of_two(divisions: int, requested: int, block: int) -> None:
    assert allocator(roundup_power2_divisions=divisions).allocate(requested).size_bytes == block


def test_divisions_by_interval() -> None:
    table = [0] * 16
    table[0], table[2], table[15] = 2, 4, 1
    config = AllocatorConfig(roundup_power2_divisions=tuple(table))
    assert config.rounded(5 * 1024) == 6 * 1024  # below 1 MiB: the first interval
    assert config.rounded(MIB + 1) == MIB + MIB // 2
    assert config.rounded(2 * MIB + 1) == 2 * MIB + 512
    assert config.rounded(4 * MIB + 1) == 5 * MIB
    assert config.rounded(8 * MIB - 1) == 8 * MIB
    assert config.rounded(100 * GIB + 1) == 100 * GIB + 512  # above 32 GiB: the last one


def test_large_segment_size_setting() -> None:
    memory = allocator(large_segment_size_bytes=64 * MIB)
    memory.allocate(2 * MIB)
    memory.allocate(10 * MIB)
    assert memory.segment_sizes() == [64 * MIB]


# Which block serves


def test_best_fit() -> None:
    memory = allocator()
    large, small, middle = (memory.allocate(size * MIB) for size in (30, 12, 20))
    for block in (large, small, middle):
        memory.free(block)
    assert memory.allocate(13 * MIB).address == middle.address
    assert memory.reserved_bytes == 62 * MIB


def test_lowest_address_among_equals() -> None:
    memory = allocator()
    blocks = [memory.allocate(12 * MIB) for _ in range(3)]
    for block in (blocks[1], blocks[2], blocks[0]):
        memory.free(block)
    assert memory.allocate(12 * MIB).address == min(block.address for block in blocks)


@pytest.mark.parametrize("size", [1024, 4 * MIB])
def test_a_stream_takes_only_its_own_blocks(size: int) -> None:
    memory = allocator()
    memory.free(memory.allocate(size, stream=0))
    memory.allocate(size, stream=7)
    assert len(memory.segment_sizes()) == 2
    assert [segment["stream"] for segment in memory.snapshot()] == [0, 7]
    memory.allocate(size, stream=0)
    assert len(memory.segment_sizes()) == 2


def test_pools_do_not_share_blocks() -> None:
    memory = allocator()
    memory.free(memory.allocate(4 * MIB))
    memory.allocate(1024)
    assert memory.segment_sizes() == [20 * MIB, 2 * MIB]


# Splitting


def test_small_blocks_split_down_to_512_bytes() -> None:
    memory = allocator()
    memory.allocate(MIB)
    block = memory.allocate(MIB - 512)
    assert layout(memory) == [[("used", MIB), ("used", MIB - 512), ("free", 512)]]
    memory.free(block)
    assert memory.allocate(MIB).size_bytes == MIB


def test_large_blocks_split_only_if_more_than_a_mebibyte_remains() -> None:
    memory = allocator()
    first = memory.allocate(20 * MIB)
    memory.free(first)
    whole = memory.allocate(19 * MIB)
    assert whole.size_bytes == 20 * MIB  # exactly 1 MiB would remain
    assert memory.allocated_bytes == 20 * MIB
    assert memory.stats()["requested_bytes.all.current"] == 19 * MIB
    memory.free(whole)
    assert memory.allocate(19 * MIB - 512).size_bytes == 19 * MIB - 512
    assert layout(memory) == [[("used", 19 * MIB - 512), ("free", MIB + 512)]]


def test_the_front_of_a_block_is_handed_out() -> None:
    memory = allocator()
    first, second = memory.allocate(4 * MIB), memory.allocate(4 * MIB)
    assert second.address == first.address + 4 * MIB


# Freeing


def test_free_merges_with_both_neighbours() -> None:
    memory = allocator()
    blocks = [memory.allocate(4 * MIB) for _ in range(5)]
    memory.free(blocks[0])
    memory.free(blocks[2])
    assert [state for state, _ in layout(memory)[0]] == ["free", "used", "free", "used", "used"]
    memory.free(blocks[1])
    assert layout(memory) == [[("free", 12 * MIB), ("used", 4 * MIB), ("used", 4 * MIB)]]
    memory.free(blocks[4])
    memory.free(blocks[3])
    assert layout(memory) == [[("free", 20 * MIB)]]
    assert memory.allocated_bytes == 0
    assert memory.reserved_bytes == 20 * MIB


def test_neighbouring_segments_do_not_merge() -> None:
    memory = allocator()
    blocks = [memory.allocate(12 * MIB) for _ in range(2)]
    for block in blocks:
        memory.free(block)
    assert layout(memory) == [[("free", 12 * MIB)], [("free", 12 * MIB)]]


def test_a_block_keeps_its_figures_after_it_was_freed() -> None:
    memory = allocator()
    first, second = memory.allocate(4 * MIB), memory.allocate(4 * MIB - 100)
    memory.free(first)
    memory.free(second)
    again = memory.allocate(8 * MIB)
    assert again.address == first.address
    assert (first.size_bytes, second.size_bytes) == (4 * MIB, 4 * MIB)
    assert second.requested_bytes == 4 * MIB - 100
    assert second.stream == 0


def test_a_block_is_freed_once() -> None:
    memory = allocator()
    block = memory.allocate(4 * MIB)
    memory.free(block)
    with pytest.raises(ValueError, match="not handed out"):
        memory.free(block)
    again = memory.allocate(4 * MIB)
    assert again.address == block.address
    with pytest.raises(ValueError, match="not handed out"):
        memory.free(block)
    with pytest.raises(ValueError, match="not handed out"):
        memory.record_stream(block, 3)
    assert memory.allocated_bytes == 4 * MIB


def test_empty_cache_releases_segments_with_nothing_in_use() -> None:
    memory = allocator()
    kept, gone = memory.allocate(4 * MIB), memory.allocate(30 * MIB)
    memory.free(memory.allocate(1024))
    memory.free(memory.allocate(4 * MIB))
    memory.free(gone)
    memory.empty_cache()
    assert layout(memory) == [[("used", 4 * MIB), ("free", 16 * MIB)]]
    memory.free(kept)
    memory.empty_cache()
    assert memory.reserved_bytes == 0
    assert memory.peak_reserved_bytes == 52 * MIB
    assert memory.stats()["num_device_free"] == 3
    assert memory.stats()["num_sync_all_streams"] == 2


def test_addresses_are_aligned_ascending_and_never_used_twice() -> None:
    memory = allocator()
    seen = []
    for _ in range(3):
        block = memory.allocate(11 * MIB)
        seen.append(block.address)
        memory.free(block)
        memory.empty_cache()
    assert seen == sorted(set(seen))
    assert all(address % (2 * MIB) == 0 for address in seen)


# A full card


def test_out_of_memory_says_what_was_asked_and_what_is_there() -> None:
    memory = allocator(64)
    memory.allocate(3 * MIB)
    memory.allocate(30 * MIB)
    with pytest.raises(OutOfMemory, match="tried to allocate 20971520 bytes with 14680064 of 67108864 free") as caught:
        memory.allocate(5 * MIB, stream=2)
    error = caught.value
    assert (error.requested_bytes, error.segment_bytes, error.stream) == (5 * MIB, 20 * MIB, 2)
    assert (error.capacity_bytes, error.free_bytes) == (64 * MIB, 14 * MIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (33 * MIB, 50 * MIB)
    assert error.allowed_bytes is None
    copy = pickle.loads(pickle.dumps(error))
    assert vars(copy) == vars(error)
    assert (memory.num_alloc_retries, memory.num_ooms) == (1, 1)
    memory.allocate(5 * MIB)
    assert memory.reserved_bytes == 50 * MIB


def test_the_whole_capacity_can_be_used() -> None:
    memory = allocator(64)
    memory.allocate(64 * MIB)
    assert (memory.free_bytes, memory.reserved_bytes) == (0, memory.capacity_bytes)


def test_cached_segments_are_released_before_giving_up() -> None:
    memory = allocator(64)
    for size in (12 * MIB, 14 * MIB, 1024):
        memory.free(memory.allocate(size, stream=5))
    used = memory.allocate(4 * MIB)
    memory.allocate(40 * MIB)
    assert (memory.num_alloc_retries, memory.num_ooms) == (1, 0)
    assert [segment["total_size"] for segment in memory.snapshot()] == [20 * MIB, 40 * MIB]
    assert used.address == memory.snapshot()[0]["address"]


def test_no_retry_while_there_is_room() -> None:
    memory = allocator(64)
    memory.free(memory.allocate(12 * MIB))
    memory.allocate(52 * MIB)
    assert memory.num_alloc_retries == 0
    assert memory.reserved_bytes == 64 * MIB


# Memory fraction and garbage collection


def test_memory_fraction_is_of_the_total_and_limits_what_is_reserved() -> None:
    config = AllocatorConfig(per_process_memory_fraction=0.5)
    memory = CachingAllocator(90 * MIB, config=config, total_bytes=100 * MIB)
    memory.free(memory.allocate(50 * MIB))
    memory.allocate(40 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        memory.allocate(12 * MIB)
    assert caught.value.allowed_bytes == 50 * MIB
    assert caught.value.free_bytes == 40 * MIB
    memory.set_memory_fraction(1)
    memory.allocate(12 * MIB)
    with pytest.raises(ValueError, match="fraction"):
        memory.set_memory_fraction(1.5)


def test_memory_fraction_counts_the_segment_not_the_request() -> None:
    memory = allocator(100, per_process_memory_fraction=0.5)
    memory.allocate(40 * MIB)
    with pytest.raises(OutOfMemory):
        memory.allocate(5 * MIB)
    memory.allocate(10 * MIB)
    assert memory.reserved_bytes == 50 * MIB


def collecting(fraction: float = 0.99) -> CachingAllocator:
    return allocator(200, garbage_collection_threshold=0.5, per_process_memory_fraction=fraction)


def test_garbage_collection_goes_on_with_the_younger_ones_until_enough_is_released() -> None:
    memory = collecting()
    memory.allocate(4 * MIB)
    old, young = memory.allocate(20 * MIB), memory.allocate(30 * MIB)
    memory.allocate(60 * MIB)
    memory.free(old)
    memory.allocate(4 * MIB)  # from the rest of the first segment: a search, and old is older
    memory.free(young)
    memory.allocate(36 * MIB)  # 130 of 198 MiB reserved: 31 to release, of which the old one is 20
    assert [segment["total_size"] // MIB for segment in memory.snapshot()] == [20, 60, 36]
    assert memory.num_alloc_retries == 0


def test_garbage_collection_releases_what_is_at_least_as_old_as_the_average_first() -> None:
    memory = collecting()
    old, young = memory.allocate(40 * MIB), memory.allocate(30 * MIB)
    memory.free(old)
    memory.allocate(50 * MIB)
    memory.free(young)
    memory.allocate(42 * MIB)  # 120 of 198 MiB reserved: 21 to release
    assert [segment["total_size"] for segment in memory.snapshot()] == [30 * MIB, 50 * MIB, 42 * MIB]
    assert memory.stats()["num_device_free"] == 1


def test_garbage_collection_counts_age_in_searches_of_the_large_pool() -> None:
    memory = collecting()
    first, second = memory.allocate(40 * MIB), memory.allocate(42 * MIB)
    memory.free(first)
    memory.free(second)
    memory.free(memory.allocate(40 * MIB))  # the first one is now the younger
    memory.allocate(1024)
    memory.allocate(50 * MIB)  # 84 of 198 MiB: below the threshold of 99
    assert memory.reserved_bytes == 134 * MIB
    memory.allocate(44 * MIB)  # 35 to release
    assert sorted(segment["total_size"] for segment in memory.snapshot()) == [2 * MIB, 40 * MIB, 44 * MIB, 50 * MIB]


def test_garbage_collection_spares_split_and_small_blocks() -> None:
    memory = collecting()
    memory.free(memory.allocate(1024))
    memory.allocate(100 * MIB)
    memory.allocate(4 * MIB)
    memory.allocate(30 * MIB)
    assert memory.reserved_bytes == 152 * MIB
    assert memory.stats()["num_device_free"] == 0


@pytest.mark.parametrize(
    "settings",
    [{"garbage_collection_threshold": 0.5}, {"per_process_memory_fraction": 0.99}],
    ids=["no fraction", "no threshold"],
)
def test_garbage_collection_needs_fraction_and_threshold(settings: dict[str, float]) -> None:
    memory = allocator(200, **settings)
    memory.free(memory.allocate(120 * MIB))
    memory.allocate(121 * MIB - 43 * MIB, stream=1)
    assert memory.reserved_bytes == 198 * MIB


# Oversize blocks


def test_a_request_below_max_split_size_leaves_oversize_blocks_alone() -> None:
    memory = allocator(max_split_size_bytes=40 * MIB)
    memory.free(memory.allocate(40 * MIB))
    memory.allocate(38 * MIB)
    assert memory.segment_sizes() == [40 * MIB, 38 * MIB]


@pytest.mark.parametrize(("cached_mib", "reused"), [(60, True), (62, True), (70, False)])
def test_an_oversize_request_takes_an_oversize_block_of_less_than_20_mib_more(cached_mib: int, reused: bool) -> None:
    memory = allocator(max_split_size_bytes=40 * MIB)
    memory.free(memory.allocate(cached_mib * MIB))
    block = memory.allocate(50 * MIB)
    assert (len(memory.segment_sizes()) == 1) is reused
    assert block.size_bytes == (cached_mib if reused else 50) * MIB  # never split


def test_non_split_rounding_setting() -> None:
    memory = allocator(max_split_size_bytes=40 * MIB, max_non_split_rounding_bytes=30 * MIB)
    memory.free(memory.allocate(78 * MIB))
    assert memory.allocate(50 * MIB).size_bytes == 78 * MIB
    memory = allocator(max_split_size_bytes=40 * MIB, max_non_split_rounding_bytes=30 * MIB)
    memory.free(memory.allocate(80 * MIB))
    assert memory.allocate(50 * MIB).size_bytes == 50 * MIB


def test_blocks_below_max_split_size_are_split() -> None:
    memory = allocator(max_split_size_bytes=40 * MIB)
    memory.free(memory.allocate(38 * MIB))
    assert memory.allocate(11 * MIB).size_bytes == 11 * MIB
    assert memory.segment_sizes() == [38 * MIB]


def test_one_oversize_block_is_released_if_it_is_enough() -> None:
    memory = allocator(200, max_split_size_bytes=40 * MIB)
    blocks = [memory.allocate(size * MIB) for size in (50, 70, 60)]
    for block in blocks:
        memory.free(block)
    memory.allocate(30 * MIB)  # at least max_split_size must go: the smallest of them
    assert [segment["total_size"] // MIB for segment in memory.snapshot()] == [70, 60, 30]
    assert memory.num_alloc_retries == 0


def test_oversize_blocks_are_released_from_the_largest_until_enough() -> None:
    memory = allocator(200, max_split_size_bytes=40 * MIB)
    blocks = [memory.allocate(size * MIB) for size in (40, 70, 60)]
    memory.free(memory.allocate(12 * MIB))
    for block in blocks:
        memory.free(block)
    memory.allocate(100 * MIB)
    assert [segment["total_size"] // MIB for segment in memory.snapshot()] == [40, 12, 100]
    assert memory.num_alloc_retries == 0


def test_blocks_below_max_split_size_do_not_make_up_what_oversize_ones_lack() -> None:
    memory = allocator(200, max_split_size_bytes=40 * MIB)
    memory.allocate(50 * MIB)
    blocks = [memory.allocate(size * MIB) for size in (62, 38)]
    for block in blocks:
        memory.free(block)
    memory.allocate(100 * MIB)
    assert memory.num_alloc_retries == 1


def test_oversize_blocks_of_another_stream_go_with_everything_cached() -> None:
    memory = allocator(200, max_split_size_bytes=40 * MIB)
    memory.free(memory.allocate(150 * MIB, stream=1))
    memory.free(memory.allocate(12 * MIB, stream=1))
    memory.allocate(100 * MIB, stream=2)
    assert memory.reserved_bytes == 100 * MIB
    assert memory.num_alloc_retries == 1


def test_oversize_counters() -> None:
    memory = allocator(max_split_size_bytes=40 * MIB)
    block = memory.allocate(40 * MIB)
    memory.allocate(39 * MIB - 1024 * 1024)
    stats = memory.stats()
    assert stats["max_split_size"] == 40 * MIB
    assert stats["oversize_allocations.current"] == stats["oversize_segments.current"] == 1
    memory.free(block)
    assert memory.stats()["oversize_allocations.current"] == 0
    assert memory.stats()["oversize_segments.current"] == 1
    memory.empty_cache()
    stats = memory.stats()
    assert stats["oversize_segments.current"] == 0
    assert (stats["oversize_segments.allocated"], stats["oversize_segments.freed"]) == (1, 1)
    assert stats["oversize_allocations.peak"] == 1


# Blocks that several streams use


def test_a_block_waits_for_the_streams_that_used_it() -> None:
    streams = Streams()
    memory = CachingAllocator(GIB, record_event=streams.record)
    block = memory.allocate(12 * MIB)
    memory.record_stream(block, 3)
    memory.record_stream(block, 2)
    memory.record_stream(block, 3)
    memory.free(block)
    assert [stream for stream, _ in streams.events] == [2, 3]
    assert layout(memory) == [[("wait", 12 * MIB)]]
    assert memory.allocated_bytes == 0
    assert memory.stats()["active_bytes.all.current"] == 12 * MIB
    assert memory.stats()["requested_bytes.all.current"] == 12 * MIB
    with pytest.raises(ValueError, match="not handed out"):
        memory.free(block)
    streams.events[0][1].done = True
    memory.allocate(12 * MIB)
    assert memory.segment_sizes() == [12 * MIB] * 2
    streams.events[1][1].done = True
    assert layout(memory)[0] == [("wait", 12 * MIB)]  # looked at when something is allocated
    assert memory.allocate(12 * MIB).address == block.address
    assert memory.stats()["active_bytes.all.current"] == memory.allocated_bytes == 24 * MIB


def test_use_on_the_own_stream_does_not_wait() -> None:
    streams = Streams()
    memory = CachingAllocator(GIB, record_event=streams.record)
    block = memory.allocate(12 * MIB, stream=4)
    memory.record_stream(block, 4)
    memory.free(block)
    assert streams.events == []
    assert layout(memory) == [[("free", 12 * MIB)]]


def test_a_block_that_waits_does_not_merge() -> None:
    streams = Streams()
    memory = CachingAllocator(GIB, record_event=streams.record)
    first, second = memory.allocate(4 * MIB), memory.allocate(4 * MIB)
    memory.record_stream(first, 1)
    memory.free(first)
    memory.free(second)
    assert layout(memory) == [[("wait", 4 * MIB), ("free", 16 * MIB)]]
    streams.events[0][1].done = True
    memory.allocate(1)
    assert layout(memory)[0] == [("free", 20 * MIB)]


def test_an_event_not_passed_holds_up_those_behind_it_on_its_stream() -> None:
    streams = Streams()
    memory = CachingAllocator(GIB, record_event=streams.record)
    blocks = [memory.allocate(12 * MIB) for _ in range(3)]
    for block, stream in zip(blocks, (1, 1, 2), strict=True):
        memory.record_stream(block, stream)
        memory.free(block)
    streams.events[1][1].done = streams.events[2][1].done = True
    memory.allocate(1)
    assert [segment[0][0] for segment in layout(memory)[:3]] == ["wait", "wait", "free"]


def test_without_events_a_block_is_back_at_the_next_allocation() -> None:
    memory = allocator()
    block = memory.allocate(12 * MIB)
    memory.record_stream(block, 1)
    memory.free(block)
    assert layout(memory) == [[("wait", 12 * MIB)]]
    assert memory.allocate(12 * MIB).address == block.address


def test_empty_cache_waits_for_the_streams() -> None:
    streams = Streams()
    memory = CachingAllocator(GIB, record_event=streams.record)
    block = memory.allocate(12 * MIB)
    memory.record_stream(block, 1)
    memory.record_stream(block, 2)
    memory.free(block)
    memory.empty_cache()
    assert [event.waited for _, event in streams.events] == [1, 1]
    assert memory.reserved_bytes == 0
    assert memory.stats()["active.all.current"] == 0
    memory.empty_cache()
    assert [event.waited for _, event in streams.events] == [1, 1]


def test_the_retry_waits_for_the_streams() -> None:
    memory = CachingAllocator(64 * MIB, record_event=Streams().record)
    block = memory.allocate(40 * MIB)
    memory.record_stream(block, 1)
    memory.free(block)
    memory.allocate(30 * MIB)
    assert memory.reserved_bytes == 30 * MIB


def test_the_retry_does_not_search_the_cache_again() -> None:
    """As torch 2.13: the block that came back serves only the next request (its issue 189504)."""
    memory = CachingAllocator(20 * MIB, record_event=Streams().record)
    block, _ = memory.allocate(4 * MIB), memory.allocate(16 * MIB)
    memory.record_stream(block, 1)
    memory.free(block)
    with pytest.raises(OutOfMemory):
        memory.allocate(4 * MIB)
    assert memory.allocate(4 * MIB).address == block.address


# Expandable segments


def expandable(capacity_mib: int = 1024, **settings: Any) -> CachingAllocator:
    return allocator(capacity_mib, expandable_segments=True, **settings)


def test_an_expandable_segment_grows_by_pages() -> None:
    memory = expandable()
    first = memory.allocate(4 * MIB)
    second = memory.allocate(50 * MIB)
    small = memory.allocate(512)
    assert second.address == first.address + 4 * MIB
    assert memory.segment_sizes() == [20 * MIB, 40 * MIB, 2 * MIB]
    segments = memory.snapshot()
    assert [(s["total_size"], s["segment_type"], s["is_expandable"]) for s in segments] == [
        (60 * MIB, "large", True),
        (2 * MIB, "small", True),
    ]
    assert small.address == segments[1]["address"]
    assert memory.reserved_bytes == 62 * MIB
    stats = memory.stats()
    assert stats["segment.all.current"] == stats["inactive_split.all.peak"] == 0
    assert stats["num_device_alloc"] == 3


def test_expandable_pages_follow_the_large_segment_size() -> None:
    memory = expandable(large_segment_size_bytes=64 * MIB)
    memory.allocate(2 * MIB)
    memory.allocate(512)
    assert memory.segment_sizes() == [64 * MIB, 2 * MIB]


def test_each_stream_has_its_own_expandable_segment() -> None:
    memory = expandable()
    memory.allocate(4 * MIB, stream=0)
    memory.allocate(4 * MIB, stream=1)
    assert [(s["stream"], s["total_size"]) for s in memory.snapshot()] == [(0, 20 * MIB), (1, 20 * MIB)]


def test_expandable_blocks_split_down_to_512_bytes() -> None:
    memory = expandable()
    memory.allocate(20 * MIB - 512)
    assert layout(memory) == [[("used", 20 * MIB - 512), ("free", 512)]]
    memory.allocate(20 * MIB)
    assert layout(memory) == [[("used", 20 * MIB - 512), ("used", 20 * MIB), ("free", 512)]]


def test_expandable_blocks_split_whatever_the_max_split_size() -> None:
    memory = expandable(max_split_size_bytes=20 * MIB)
    assert memory.allocate(30 * MIB).size_bytes == 30 * MIB
    assert memory.stats()["oversize_allocations.current"] == 1
    assert memory.stats()["oversize_segments.allocated"] == 0


def test_expandable_lowest_address_among_equals() -> None:
    memory = expandable()
    blocks = [memory.allocate(10 * MIB) for _ in range(5)]
    for index in (3, 1):
        memory.free(blocks[index])
    assert memory.allocate(10 * MIB).address == blocks[1].address


def test_empty_cache_unmaps_whole_pages_only() -> None:
    memory = expandable()
    blocks = [memory.allocate(size * MIB) for size in (10, 60, 30)]
    assert memory.reserved_bytes == 100 * MIB
    memory.free(blocks[1])
    memory.empty_cache()
    assert memory.reserved_bytes == 60 * MIB
    assert layout(memory) == [
        [("used", 10 * MIB), ("free", 10 * MIB)],
        [("free", 10 * MIB), ("used", 30 * MIB)],
    ]
    assert memory.stats()["num_device_free"] == 1
    memory.free(blocks[0])
    memory.free(blocks[2])
    memory.empty_cache()
    assert memory.reserved_bytes == 0
    assert memory.snapshot() == []
    assert memory.allocate(4 * MIB).address > blocks[2].address  # the segment was given up: a new one


def test_unmapped_gaps_are_filled_from_the_lowest_address() -> None:
    memory = expandable()
    blocks = [memory.allocate(size * MIB) for size in (20, 40, 20, 20, 20)]
    for index in (1, 3):
        memory.free(blocks[index])
    memory.empty_cache()
    assert memory.reserved_bytes == 60 * MIB
    assert memory.allocate(50 * MIB).address == blocks[4].address + 20 * MIB  # fits in no gap
    assert memory.allocate(20 * MIB).address == blocks[1].address
    assert memory.reserved_bytes == (60 + 60 + 20) * MIB


def test_a_free_block_before_a_gap_counts_as_room() -> None:
    memory = expandable()
    blocks = [memory.allocate(size * MIB) for size in (10, 50, 20)]
    memory.free(blocks[1])
    memory.empty_cache()
    assert layout(memory)[0] == [("used", 10 * MIB), ("free", 10 * MIB)]
    assert memory.allocate(50 * MIB).address == blocks[1].address
    assert layout(memory) == [[("used", 10 * MIB), ("used", 50 * MIB), ("used", 20 * MIB)]]


def test_mapped_pages_merge_with_free_blocks_on_both_sides() -> None:
    memory = expandable()
    blocks = [memory.allocate(size * MIB) for size in (10, 60, 30)]
    memory.free(blocks[1])
    memory.empty_cache()
    assert memory.allocate(45 * MIB).address == blocks[1].address
    assert layout(memory) == [[("used", 10 * MIB), ("used", 45 * MIB), ("free", 15 * MIB), ("used", 30 * MIB)]]


def test_a_free_block_after_a_gap_counts_as_room() -> None:
    memory = expandable()
    blocks = [memory.allocate(size * MIB) for size in (20, 25, 10)]
    memory.free(blocks[1])
    memory.empty_cache()
    assert layout(memory) == [[("used", 20 * MIB)], [("free", 5 * MIB), ("used", 10 * MIB), ("free", 5 * MIB)]]
    assert memory.allocate(24 * MIB).address == blocks[1].address
    assert memory.reserved_bytes == 60 * MIB
    assert memory.segment_sizes()[-1] == 20 * MIB


def test_expandable_best_fit_counts_what_a_block_can_grow_to() -> None:
    memory = expandable()
    blocks = [memory.allocate(size * MIB) for size in (18, 6, 30)]
    assert layout(memory)[0][-1] == ("free", 6 * MIB)
    memory.free(blocks[0])
    # 6 MiB at the end would fit better, but it can grow
    assert memory.allocate(5 * MIB).address == blocks[0].address


def test_an_expandable_segment_that_is_full_gets_a_second_one() -> None:
    memory = expandable(100)  # 9/8 of it in pages of 20 MiB: 120 MiB of addresses
    blocks = [memory.allocate(20 * MIB) for _ in range(5)]
    for block in (blocks[1], blocks[3]):
        memory.free(block)
    block = memory.allocate(30 * MIB)
    assert memory.num_alloc_retries == 1
    assert block.address == blocks[0].address + 120 * MIB
    assert len(memory.snapshot()) == 4


def test_expandable_out_of_memory_keeps_what_was_mapped_on_the_way() -> None:
    memory = expandable(64)
    memory.allocate(20 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        memory.allocate(41 * MIB)
    assert caught.value.segment_bytes == 42 * MIB
    assert (memory.num_alloc_retries, memory.num_ooms) == (1, 1)
    assert memory.reserved_bytes == 20 * MIB
    memory.allocate(40 * MIB)
    assert memory.reserved_bytes == 60 * MIB


def test_expandable_retry_unmaps_other_streams() -> None:
    memory = expandable(64)
    memory.free(memory.allocate(60 * MIB, stream=1))
    memory.allocate(50 * MIB, stream=2)
    assert memory.reserved_bytes == 60 * MIB
    assert [s["stream"] for s in memory.snapshot()] == [2]


# Reports

METRICS = ("current", "peak", "allocated", "freed")
ARRAYS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)


def test_stats_have_the_names_of_torch() -> None:
    names = {f"{array}.{pool}.{m}" for array in ARRAYS for pool in ("all", "large_pool", "small_pool") for m in METRICS}
    names |= {f"oversize_{kind}.{m}" for kind in ("allocations", "segments") for m in METRICS}
    stats = allocator().stats()
    assert list(stats) == sorted(names | set(COUNTS))
    assert stats.pop("max_split_size") == -1
    assert set(stats.values()) == {0}


def test_inactive_split_follows_the_free_blocks_of_split_segments() -> None:
    memory = allocator()

    def now() -> tuple[int, int]:
        stats = memory.stats()
        return stats["inactive_split.large_pool.current"], stats["inactive_split_bytes.all.current"] // MIB

    blocks = [memory.allocate(4 * MIB)]
    assert now() == (1, 16)
    blocks += [memory.allocate(4 * MIB) for _ in range(3)]
    assert now() == (1, 4)
    memory.free(blocks[1])
    assert now() == (2, 8)
    memory.free(blocks[2])
    assert now() == (2, 12)
    blocks[1] = memory.allocate(8 * MIB)
    assert now() == (1, 4)
    for block in (blocks[1], blocks[0], blocks[3]):
        memory.free(block)
    assert now() == (0, 0)
    stats = memory.stats()
    assert stats["inactive_split.all.peak"] == 2
    assert stats["inactive_split.all.allocated"] == stats["inactive_split.all.freed"] == 3
    assert stats["inactive_split_bytes.all.allocated"] == stats["inactive_split_bytes.all.freed"]


def test_resets() -> None:
    memory = allocator(64, max_split_size_bytes=20 * MIB)
    memory.free(memory.allocate(30 * MIB))
    memory.allocate(1024)
    with pytest.raises(OutOfMemory):
        memory.allocate(GIB)
    memory.reset_peak_stats()
    stats = memory.stats()
    assert memory.peak_allocated_bytes == stats["allocated_bytes.all.peak"] == 1024
    assert memory.peak_reserved_bytes == 2 * MIB
    assert stats["active_bytes.all.peak"] == 1024
    assert stats["oversize_segments.peak"] == 0
    assert stats["allocation.all.allocated"] == 2
    memory.reset_accumulated_stats()
    stats = memory.stats()
    for name in ("allocation.all", "active.all", "reserved_bytes.small_pool", "oversize_allocations"):
        assert stats[f"{name}.allocated"] == stats[f"{name}.freed"] == 0
    assert [stats[name] for name in COUNTS if name.startswith("num_")] == [0] * 6
    assert stats["allocation.all.current"] == stats["allocation.all.peak"] == 1
    memory.allocate(512)
    assert memory.stats()["active.all.allocated"] == 1


def test_active_peak_and_sums_include_blocks_that_wait() -> None:
    streams = Streams()
    memory = CachingAllocator(GIB, record_event=streams.record)
    block = memory.allocate(12 * MIB)
    memory.record_stream(block, 1)
    memory.free(block)
    memory.allocate(14 * MIB)
    stats = memory.stats()
    assert stats["allocated_bytes.all.peak"] == 14 * MIB
    assert stats["active_bytes.all.peak"] == 26 * MIB
    assert stats["active.all.peak"] == stats["active.large_pool.peak"] == 2
    assert (stats["active.all.freed"], stats["allocation.all.freed"]) == (0, 1)
    memory.reset_peak_stats()
    memory.reset_accumulated_stats()
    streams.events[0][1].done = True
    memory.allocate(1024)
    stats = memory.stats()
    assert (stats["active.all.freed"], stats["allocation.all.freed"]) == (1, 0)
    assert stats["active_bytes.all.peak"] == 26 * MIB
    assert stats["active_bytes.all.current"] == 14 * MIB + 1024


def test_snapshot_has_the_shape_of_torch() -> None:
    memory = allocator()
    memory.allocate(3 * MIB - 7, stream=2)
    memory.free(memory.allocate(600))
    large, small = memory.snapshot()
    address = large["address"]
    assert large == {
        "device": 0,
        "address": address,
        "total_size": 20 * MIB,
        "allocated_size": 3 * MIB,
        "active_size": 3 * MIB,
        "requested_size": 3 * MIB - 7,
        "stream": 2,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": address,
                "size": 3 * MIB,
                "requested_size": 3 * MIB - 7,
                "state": "active_allocated",
                "frames": [],
            },
            {
                "address": address + 3 * MIB,
                "size": 17 * MIB,
                "requested_size": 0,
                "state": "inactive",
                "frames": [],
            },
        ],
    }
    assert small["address"] > address
    assert small["segment_type"] == "small"
    assert [(b["size"], b["requested_size"], b["state"]) for b in small["blocks"]] == [(2 * MIB, 600, "inactive")]
    assert (small["allocated_size"], small["active_size"], small["requested_size"]) == (0, 0, 0)


# Settings


def test_settings_are_read_from_the_environment_syntax() -> None:
    text = (
        " max_split_size_mb : 128, garbage_collection_threshold:0.6,expandable_segments:True,"
        "per_process_memory_fraction:0.9,large_segment_size_mb:64,max_non_split_rounding_mb:100,"
        "backend:native,pinned_use_background_threads:True,throw_on_cudamalloc_oom:False,"
    )
    assert AllocatorConfig.parse(text) == AllocatorConfig(
        max_split_size_bytes=128 * MIB,
        garbage_collection_threshold=0.6,
        expandable_segments=True,
        per_process_memory_fraction=0.9,
        large_segment_size_bytes=64 * MIB,
        max_non_split_rounding_bytes=100 * MIB,
    )
    assert AllocatorConfig.parse("") == AllocatorConfig()


def test_roundup_settings() -> None:
    assert AllocatorConfig.parse("roundup_power2_divisions:8").roundup_power2_divisions == 8
    listed = AllocatorConfig.parse("roundup_power2_divisions:[4:2,16:8,>:1],expandable_segments:False")
    # what is smaller than the first boundary goes with it; what is between two boundaries is off
    assert listed.roundup_power2_divisions == (2, 2, 2, 0, 8, *[1] * 11)
    single = AllocatorConfig.parse("roundup_power2_divisions:[65536:4]")
    assert single.roundup_power2_divisions == (4,) * 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:30", "unknown allocator setting 'max_split_size': did you mean 'max_split_size_mb'"),
        ("expandable_segment:True", "did you mean 'expandable_segments'"),
        ("qqq:1", "unknown allocator setting 'qqq': known: backend"),
        ("max_split_size_mb", "not of the form key:value"),
        ("max_split_size_mb:30:40", "not of the form key:value"),
        ("max_split_size_mb:19", "at least 20 MiB"),
        ("max_split_size_mb:many", "whole number of MiB, not 'many'"),
        ("max_split_size_mb:32,large_segment_size_mb:64", "at least 64 MiB"),
        ("max_non_split_rounding_mb:10", "at least 20 MiB"),
        ("large_segment_size_mb:10", "over 10 MiB"),
        ("garbage_collection_threshold:0", "between 0 and 1"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:half", "needs a number"),
        ("per_process_memory_fraction:1.1", r"in \[0, 1\]"),
        ("expandable_segments:true", "True or False, not 'true'"),
        ("roundup_power2_divisions:3", "powers of two, not '3'"),
        ("roundup_power2_divisions:0", "power of two, not 0"),
        ("roundup_power2_divisions:[3:4]", "powers of two, not '3'"),
        ("roundup_power2_divisions:[0:4]", "boundary must be a power of two"),
        ("roundup_power2_divisions:[4]", "powers of two, not ''"),
        ("roundup_power2_divisions:[>:5]", "powers of two, not '5'"),
        ("backend:cudaMallocAsync", "not simulated, only backend:native"),
        ("throw_on_cudamalloc_oom:True", "not simulated"),
    ],
)
def test_settings_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllocatorConfig.parse(text)


@pytest.mark.parametrize("divisions", [3, -2, (1, 2), (3,) * 16])
def test_divisions_that_cannot_be(divisions: Any) -> None:
    with pytest.raises(ValueError, match="roundup_power2_divisions"):
        AllocatorConfig(roundup_power2_divisions=divisions)


def test_the_older_variable_comes_first() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:30", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:40"}
    assert AllocatorConfig.from_environment(environ).max_split_size_bytes == 40 * MIB
    del environ["PYTORCH_CUDA_ALLOC_CONF"]
    assert AllocatorConfig.from_environment(environ).max_split_size_bytes == 30 * MIB
    assert AllocatorConfig.from_environment({}) == AllocatorConfig()
