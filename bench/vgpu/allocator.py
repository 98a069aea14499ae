"""A simulator of PyTorch's caching allocator for CUDA, exact to the byte.

Follows `DeviceCachingAllocator` in c10/cuda/CUDACachingAllocator.cpp, torch 2.13 (read in main shortly before
that release; constants, settings and counters checked with the headers of the 2.13 wheel). Each function names the one
that it follows. Left out: CUDA graphs, memory pools of the user, and the settings that `AllocatorConfig.parse` refuses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from bench.vgpu import expandable
from bench.vgpu.allocator_config import MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig
from bench.vgpu.allocator_stats import Gauge, gauge_report
from bench.vgpu.segments import (
    ADDRESS_BITS,
    ALLOCATED,
    DEAD,
    FREE,
    UNMAPPED,
    Block,
    Card,
    FreeList,
    Observer,
    Pool,
    link,
    snapshot,
)
from bench.vgpu.waiting import Pending, WaitingBlocks, passed_at_once

__all__ = ["AllocatorConfig", "Block", "CachingAllocator", "OutOfMemory", "Pending"]

_UNLIMITED: Final = 2**64 - 1  # the largest size_t, which torch takes for "no limit"


@dataclass(eq=False)
class OutOfMemory(Exception):
    """The card cannot serve a request, even after everything cached was released.

    Attributes:
        requested_bytes: What was asked for.
        segment_bytes: What cudaMalloc was asked for because of it; torch's "Tried to allocate" gives this figure.
        stream: Stream of the request.
        capacity_bytes: What the card can hand out in all.
        free_bytes: What it could still hand out.
        allocated_bytes: In blocks handed out.
        reserved_bytes: In segments.
        allowed_bytes: The limit of a memory fraction below 1; None: no limit.
    """

    requested_bytes: int
    segment_bytes: int
    stream: int
    capacity_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    allowed_bytes: int | None

    def __str__(self) -> str:
        return (
            f"tried to allocate {self.segment_bytes} bytes with {self.free_bytes} of {self.capacity_bytes} free; "
            f"{self.allocated_bytes} allocated, {self.reserved_bytes} reserved"
        )


class CachingAllocator:
    """The allocator of one process on one card.

    Equal calls give equal bytes and equal addresses. Not safe to use from several threads at once.

    Attributes:
        config: Its settings.
        num_alloc_retries: cudaMalloc calls repeated after everything cached was released.
        num_ooms: Requests that failed all the same.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        config: AllocatorConfig = AllocatorConfig(),  # noqa: B008 - frozen
        record_event: Callable[[int], Pending] | None = None,
        total_bytes: int | None = None,
    ) -> None:
        """Start with nothing reserved.

        Args:
            capacity_bytes: What cudaMalloc can hand out in all: the card's memory less what lies outside the allocator.
            config: Settings; the environment is not read.
            record_event: Gives the present end of a stream's work. Asked when a block is freed that other streams
                used; the block returns to the cache once all are passed. None: they count as passed at once.
            total_bytes: The card's memory, of which a memory fraction is taken; None: `capacity_bytes`.
        """
        self.config = config
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self._num_sync_all_streams = 0
        self._total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self._card = Card(capacity_bytes)
        self._counters = self._card.counters
        self._max_split_bytes = config.max_split_size_bytes or _UNLIMITED
        self._rounding_bytes = config.max_non_split_rounding_bytes or config.large_segment_size_bytes
        self._plain = not config.expandable_segments and config.max_split_size_bytes is None
        self._rounds = config.roundup_power2_divisions != 0
        self._small = Pool(True, MIN_BLOCK_BYTES, _UNLIMITED)
        if config.expandable_segments:
            self._large = Pool(False, MIN_BLOCK_BYTES, _UNLIMITED)
        else:
            self._large = Pool(False, SMALL_REQUEST_BYTES + 1, self._max_split_bytes)
        self._oversize_allocations = Gauge()
        self._oversize_segments = Gauge()
        self._waiting = WaitingBlocks(record_event or passed_at_once)
        self._observer: Observer | None = None
        self._allowed_bytes: int | None = None
        self._collects = False
        self.set_memory_fraction(config.per_process_memory_fraction)

    @property
    def capacity_bytes(self) -> int:
        """What cudaMalloc can hand out in all."""
        return self._card.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """What cudaMalloc can still hand out."""
        return self._card.free_bytes

    @property
    def allocated_bytes(self) -> int:
        """In blocks that are handed out, now."""
        return self._counters.allocated_bytes.current

    @property
    def peak_allocated_bytes(self) -> int:
        """Highest `allocated_bytes` since `reset_peak_stats`."""
        return self._counters.allocated_bytes.peak

    @property
    def reserved_bytes(self) -> int:
        """In segments, now."""
        return self._counters.reserved_bytes.current

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest `reserved_bytes` since `reset_peak_stats`."""
        return self._counters.reserved_bytes.peak

    def set_memory_fraction(self, fraction: float) -> None:
        """Allow only this share of the card's memory to be reserved; 1 lifts the limit (setMemoryFraction).

        Raises:
            ValueError: Not in [0, 1].
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"a memory fraction must be in [0, 1], not {fraction}")
        self._allowed_bytes = int(fraction * self._total_bytes) if fraction < 1 else None
        self._collects = self._allowed_bytes is not None and self.config.garbage_collection_threshold is not None

    def observe(self, observer: Observer | None) -> None:
        """Tell `observer` of everything that happens from here on (record_trace); None: nobody."""
        self._observer = self._card.observer = observer

    def allocate(self, requested_bytes: int, stream: int = 0) -> Block:
        """Hand out a block for the work of `stream` (malloc, alloc_found_block).

        Raises:
            OutOfMemory: After everything cached was released, if need be.
            ValueError: Nothing is asked for: an empty tensor has no block.
        """
        if requested_bytes <= 0:
            raise ValueError(f"an allocation needs at least one byte, not {requested_bytes}")
        if self._waiting.queues:
            for waited in self._waiting.passed():
                self._wait_over(waited)
        size = self.config.rounded(requested_bytes) if self._rounds else (requested_bytes + 511) & -MIN_BLOCK_BYTES
        pool = self._small if size <= SMALL_REQUEST_BYTES else self._large
        free_list = pool.lists.get(stream) or pool.list_of(stream)
        if self._collects:
            pool.searches += 1
        index = bisect_left(free_list.keys, size << ADDRESS_BITS)
        if not self._plain:
            index = self._fitting(free_list, index, size)
        if index < len(free_list.keys):
            block = free_list.blocks[index]
        else:
            block = self._obtain(free_list, size, requested_bytes)
            index = -1
        split = split_bytes = 0
        was_split = block.prev is not None or block.next is not None
        remainder_bytes = block.size_bytes - size
        if remainder_bytes >= pool.least_remainder_bytes and size < pool.split_below_bytes:
            block = self._split(block, size, index)
            if was_split:
                split_bytes = -size
            else:
                split, split_bytes = 1, remainder_bytes
        else:
            size = block.size_bytes
            if index >= 0:
                free_list.pop(index)
            block.state = ALLOCATED
            if was_split:
                split, split_bytes = -1, -size
        block.requested_bytes = requested_bytes
        if block.segment.page_bytes:  # which count no split blocks: their pages can be released
            split = split_bytes = 0
        pool.counters.take(size, requested_bytes, split, split_bytes)
        self._counters.take(size, requested_bytes, split, split_bytes)
        if size >= self._max_split_bytes:
            self._oversize_allocations.increase(1)
        if self._observer is not None:
            self._observer("alloc", block.address, requested_bytes, stream)
        return block

    def _split(self, block: Block, size: int, index: int) -> Block:
        """Cut the front off a free block, which is at `index` of its free list, or not in it yet if that is -1."""
        segment = block.segment
        front = Block(block.address, size, 0, ALLOCATED, segment, block.prev, block)
        link(block.prev, front, segment)
        block.prev = front
        block.address += size
        block.size_bytes -= size
        if index < 0:
            segment.free_list.insert(block)
        else:
            segment.free_list.shrink(index, block)
        return front

    def free(self, block: Block) -> None:
        """Take a block back, at once or when the other streams that used it have passed this point (free).

        Raises:
            ValueError: It is not handed out.
        """
        if block.state != ALLOCATED:
            raise ValueError(f"the block at {block.address:#x} is not handed out")
        size = block.size_bytes
        pool = block.segment.free_list.pool
        if self._observer is not None:
            self._observer("free_requested", block.address, block.requested_bytes, block.stream)
        if size >= self._max_split_bytes:
            self._oversize_allocations.decrease(1)
        if block.used_by:
            pool.counters.wait(size)
            self._counters.wait(size)
            self._waiting.add(block)
            return
        requested = block.requested_bytes
        split, split_bytes = self._cache(block)
        pool.counters.give_back(size, requested, split, split_bytes)
        self._counters.give_back(size, requested, split, split_bytes)

    def record_stream(self, block: Block, stream: int) -> None:
        """Say that `stream`, too, uses a block (recordStream).

        Raises:
            ValueError: It is not handed out.
        """
        if block.state != ALLOCATED:
            raise ValueError(f"the block at {block.address:#x} is not handed out")
        if stream != block.stream:
            if block.used_by is None:
                block.used_by = set()
            block.used_by.add(stream)

    def empty_cache(self) -> None:
        """Wait for all other streams, then release every segment, or page, of which nothing is in use (emptyCache)."""
        self._release_cached()

    def _cache(self, block: Block) -> tuple[int, int]:
        """Merge a freed block with its free neighbours and put it into its free list (free_block).

        Returns the change in inactive split blocks: their number and bytes. The handle stays as it is and dies.
        """
        segment = block.segment
        free_list = segment.free_list
        if self._observer is not None:
            self._observer("free_completed", block.address, block.requested_bytes, free_list.stream)
        before, after = block.prev, block.next
        block.state = DEAD
        block.prev = block.next = None
        address, size = block.address, block.size_bytes
        split = 0
        if before is not None and before.state == FREE:
            free_list.remove(before)
            address = before.address
            size += before.size_bytes
            before = before.prev
            split = -1
        if after is not None and after.state == FREE:
            free_list.remove(after)
            size += after.size_bytes
            after = after.next
            split -= 1
        free = Block(address, size, block.requested_bytes, FREE, segment, before, after)
        link(before, free, segment)
        link(free, after, segment)
        free_list.insert(free)
        if segment.page_bytes:
            return 0, 0
        if before is None and after is None:
            return split, block.size_bytes - size
        return split + 1, block.size_bytes

    def _fitting(self, free_list: FreeList, index: int, size: int) -> int:
        """Index of the block to use, `index` being the smallest large enough; the list's end: none (get_free_block)."""
        blocks = free_list.blocks
        if index == len(blocks):
            return index
        if self.config.expandable_segments:
            while index + 1 < len(blocks) and _reach(blocks[index + 1]) < _reach(blocks[index]):
                index += 1
        size_bytes = blocks[index].size_bytes
        if size < self._max_split_bytes:
            fits = size_bytes < self._max_split_bytes
        else:
            fits = size_bytes < size + self._rounding_bytes
        return index if fits else len(blocks)

    def _obtain(self, free_list: FreeList, size: int, requested_bytes: int) -> Block:
        """A block that is not cached: by cudaMalloc, releasing cached ones if that fails (malloc)."""
        if self._collects:
            self._collect_garbage()
        segment_bytes = self.config.segment_bytes(size)
        block = self._grow(free_list, size, segment_bytes)
        if block is None and self._release_oversize(free_list, size):
            block = self._grow(free_list, size, segment_bytes)
        if block is None:
            self._release_cached()
            self.num_alloc_retries += 1
            block = self._grow(free_list, size, segment_bytes)  # torch does not search the cache again
        if block is None:
            self.num_ooms += 1
            if self._observer is not None:  # of which the address is what is free: device_free
                self._observer("oom", self.free_bytes, size, free_list.stream)
            raise OutOfMemory(  # by position, which is what pickle keeps of an exception
                requested_bytes,
                segment_bytes,
                free_list.stream,
                self.capacity_bytes,
                self.free_bytes,
                self.allocated_bytes,
                self.reserved_bytes,
                self._allowed_bytes,
            )
        return block

    def _grow(self, free_list: FreeList, size: int, segment_bytes: int) -> Block | None:
        """Ask the card for memory; the block is in no free list (alloc_block)."""
        if self._allowed_bytes is not None and self.reserved_bytes + segment_bytes > self._allowed_bytes:
            return None
        if self.config.expandable_segments:
            page_bytes = SMALL_SEGMENT_BYTES if free_list.pool.small else self.config.large_segment_size_bytes
            space_bytes = self._total_bytes + self._total_bytes // 8
            return expandable.grow(self._card, free_list, size, page_bytes, space_bytes)
        block = self._card.malloc(free_list, segment_bytes)
        if block is not None and segment_bytes >= self._max_split_bytes:
            self._oversize_segments.increase(1)
        return block

    def _release(self, block: Block) -> None:
        """Give a segment back that is one free block (release_block)."""
        if block.size_bytes >= self._max_split_bytes:
            self._oversize_segments.decrease(1)
        self._card.free(block)

    def _release_oversize(self, free_list: FreeList, size: int) -> bool:
        """Release as many oversize blocks as the request needs, largest first (release_available_cached_blocks)."""
        if self._max_split_bytes == _UNLIMITED:
            return False
        needed_bytes = max(size, self._max_split_bytes)
        index = bisect_left(free_list.keys, needed_bytes << ADDRESS_BITS)
        if index < len(free_list.keys) and not free_list.blocks[index].segment.page_bytes:
            self._release(free_list.blocks[index])
            return True
        released_bytes = 0
        for block in reversed(free_list.blocks[:index]):
            if released_bytes >= needed_bytes or block.size_bytes < self._max_split_bytes:
                break
            if not block.segment.page_bytes:
                released_bytes += block.size_bytes
                self._release(block)
        return released_bytes >= needed_bytes

    def _release_cached(self) -> None:
        """Release all that is cached and in no partly used segment or page (release_cached_blocks, release_blocks)."""
        self._num_sync_all_streams += 1
        for block in self._waiting.synchronize():
            self._wait_over(block)
        for pool in (self._large, self._small):
            for block in pool.cached():
                if block.segment.page_bytes:
                    expandable.release(self._card, block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def _collect_garbage(self) -> None:
        """Release whole large segments that were not used for long (garbage_collect_cached_blocks).

        Those at least as old as the average go first, all of them, then again with the average of the rest.
        """
        assert self._allowed_bytes is not None
        assert self.config.garbage_collection_threshold is not None
        target_bytes = self.reserved_bytes - int(self.config.garbage_collection_threshold * self._allowed_bytes)
        searches = self._large.searches
        whole = [block for block in self._large.cached() if block.prev is None and block.next is None]
        released_bytes = 0
        while whole and released_bytes < target_bytes:
            age = sum(searches - block.cached_at for block in whole) / len(whole)
            old = [block for block in whole if searches - block.cached_at >= age]
            for block in old:
                released_bytes += block.size_bytes
                self._release(block)
            gone = set(old)
            whole = [block for block in whole if block not in gone]

    def _wait_over(self, block: Block) -> None:
        """Cache a freed block that no stream uses any more."""
        size, requested = block.size_bytes, block.requested_bytes
        split, split_bytes = self._cache(block)
        for counters in (block.segment.free_list.pool.counters, self._counters):
            counters.wait_over(size, requested, split, split_bytes)

    def reset_peak_stats(self) -> None:
        """Make all current values the peaks (resetPeakStats)."""
        for counters in (self._small.counters, self._large.counters, self._counters):
            counters.reset_peaks()
        self._oversize_allocations.reset_peak()
        self._oversize_segments.reset_peak()

    def reset_accumulated_stats(self) -> None:
        """Start all sums and event counts at zero (resetAccumulatedStats)."""
        for counters in (self._small.counters, self._large.counters, self._counters):
            counters.reset_accumulated()
        self._oversize_allocations.reset_accumulated()
        self._oversize_segments.reset_accumulated()
        self.num_alloc_retries = self.num_ooms = self._num_sync_all_streams = 0
        self._card.calls = self._card.returns = 0

    def stats(self) -> dict[str, int]:
        """What `torch.cuda.memory_stats()` gives, in its order."""
        values = {
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "num_oom_rejections": 0,  # of throw_on_cudamalloc_oom, which is not simulated
            "num_sync_all_streams": self._num_sync_all_streams,
            "num_device_alloc": self._card.calls,
            "num_device_free": self._card.returns,
            # torch casts the size_t to int64
            "max_split_size": -1 if self._max_split_bytes == _UNLIMITED else self._max_split_bytes,
        }
        values.update(self._counters.report("all"))
        values.update(self._small.counters.report("small_pool"))
        values.update(self._large.counters.report("large_pool"))
        values.update(gauge_report("oversize_allocations", self._oversize_allocations))
        values.update(gauge_report("oversize_segments", self._oversize_segments))
        return dict(sorted(values.items()))

    def segment_sizes(self) -> list[int]:
        """Bytes of every cudaMalloc so far, or of every range mapped into an expandable segment, in order."""
        return list(self._card.history)

    def snapshot(self) -> list[dict[str, Any]]:
        """What `torch.cuda.memory_snapshot()` gives: segments by address, with their blocks (snapshot).

        Each contiguous mapped range of an expandable segment is one segment here.
        """
        return snapshot(self._card)


def _reach(block: Block) -> int:
    """Bytes that a block of an expandable segment can grow to."""
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and after.state == UNMAPPED else 0)
