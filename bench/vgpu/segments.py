"""What the caching allocator is made of: blocks in segments, the free ones in lists, and the card that gives segments.

Rules from c10/cuda/CUDACachingAllocator.cpp, torch 2.13 (`Block`, `BlockPool`, `ExpandableSegment` there).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any, Final

from bench.vgpu.allocator_stats import Counters

FREE: Final = 0  # cached, in a free list
ALLOCATED: Final = 1  # handed out
WAITING: Final = 2  # freed, but another stream may still use it
UNMAPPED: Final = 3  # addresses of an expandable segment without memory behind them
DEAD: Final = 4  # a handle whose memory was given back
_STATE_NAMES: Final = {FREE: "inactive", ALLOCATED: "active_allocated", WAITING: "active_pending_free"}

ADDRESS_BITS: Final = 64
FIRST_ADDRESS: Final = 0x7000_0000_0000  # any value will do; CUDA's addresses look like this
ADDRESS_ALIGNMENT_BYTES: Final = 2 * 2**20  # the page size of the card

Observer = Callable[[str, int, int, int], None]
"""Told of every event as CUDA's trace names it: action, address, bytes, stream (`TraceEntry`, `record_trace`)."""


class Block:
    """A range of a segment; `CachingAllocator.allocate` returns one.

    What it says of its address and sizes stays true after it was freed: the memory then belongs to other blocks.

    Attributes:
        address: First byte, a virtual address of the simulated card.
        size_bytes: What counts as allocated: the request, rounded up, and a remainder too small to split off.
        requested_bytes: What was asked for.
        state: FREE, ALLOCATED, WAITING, UNMAPPED or DEAD.
        prev: Block that ends where this one begins, in the same segment.
        next: Block that begins where this one ends, in the same segment.
        segment: Where it lies.
        used_by: Streams that used it beside its own.
        events: How many of those have not passed the free yet.
        cached_at: Value of its pool's `searches` when it became free.
    """

    __slots__ = (
        "address",
        "cached_at",
        "events",
        "next",
        "prev",
        "requested_bytes",
        "segment",
        "size_bytes",
        "state",
        "used_by",
    )

    def __init__(
        self,
        address: int,
        size_bytes: int,
        requested_bytes: int,
        state: int,
        segment: Segment,
        prev: Block | None,
        next_: Block | None,
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.requested_bytes = requested_bytes
        self.state = state
        self.segment = segment
        self.prev = prev
        self.next = next_
        self.used_by: set[int] | None = None
        self.events = 0
        self.cached_at = 0

    @property
    def stream(self) -> int:
        """Id of the stream that the block belongs to."""
        return self.segment.free_list.stream


class Segment:
    """What one cudaMalloc returned, or the address range of one expandable segment.

    Attributes:
        address: First byte.
        size_bytes: All of it, mapped or not.
        page_bytes: What an expandable segment maps at a time; 0 for a cudaMalloc.
        free_list: Where its free blocks are kept.
        head: Its first block.
    """

    __slots__ = ("address", "free_list", "head", "page_bytes", "size_bytes")

    def __init__(self, address: int, size_bytes: int, page_bytes: int, free_list: FreeList, state: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.page_bytes = page_bytes
        self.free_list = free_list
        self.head = Block(address, size_bytes, 0, state, self, None, None)


class FreeList:
    """The free blocks of one pool and one stream, by size, then address (BlockComparatorSize).

    Attributes:
        pool: The pool.
        stream: Id of the stream.
        keys: `size_bytes << ADDRESS_BITS | address` of each block, ascending.
        blocks: The blocks, in the order of `keys`.
        unmapped: Unmapped blocks, by address.
    """

    __slots__ = ("blocks", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def insert(self, block: Block) -> None:
        """Add a free block."""
        key = block.size_bytes << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)
        block.cached_at = self.pool.searches

    def pop(self, index: int) -> Block:
        """Take out the block at `index`."""
        del self.keys[index]
        return self.blocks.pop(index)

    def remove(self, block: Block) -> None:
        """Take out a free block, whose size and address must still be those it was added with."""
        index = bisect_left(self.keys, block.size_bytes << ADDRESS_BITS | block.address)
        del self.keys[index], self.blocks[index]

    def shrink(self, index: int, block: Block) -> None:
        """Put the block at `index`, which has become smaller, where it now belongs.

        Its age stays: garbage collection looks at whole segments only.
        """
        keys = self.keys
        key = block.size_bytes << ADDRESS_BITS | block.address
        if index and keys[index - 1] > key:
            self.pop(index)
            self.insert(block)
        else:
            keys[index] = key

    def insert_unmapped(self, block: Block) -> None:
        """Add an unmapped block."""
        insort(self.unmapped, block, key=_address)


def _address(block: Block) -> int:
    return block.address


class Pool:
    """The free lists of all streams for small or for large requests.

    Attributes:
        small: Whether it serves requests of up to 1 MiB.
        counters: What it counts.
        least_remainder_bytes: A block is split if at least this much would remain ...
        split_below_bytes: ... and the request is below this.
        lists: Free list by stream.
        searches: How often a free block was looked for: the clock of garbage collection, which alone counts it.
    """

    __slots__ = ("counters", "least_remainder_bytes", "lists", "searches", "small", "split_below_bytes")

    def __init__(self, small: bool, least_remainder_bytes: int, split_below_bytes: int) -> None:
        self.small = small
        self.counters = Counters()
        self.least_remainder_bytes = least_remainder_bytes
        self.split_below_bytes = split_below_bytes
        self.lists: dict[int, FreeList] = {}
        self.searches = 0

    def list_of(self, stream: int) -> FreeList:
        """The free list of `stream`, made at its first use."""
        free_list = self.lists.get(stream)
        if free_list is None:
            free_list = self.lists[stream] = FreeList(self, stream)
        return free_list

    def cached(self) -> list[Block]:
        """All free blocks, by stream, size and address."""
        return [block for stream in sorted(self.lists) for block in self.lists[stream].blocks]


class Card:
    """The memory and the addresses that the driver hands out, and the segments made of them.

    Segments lie upwards from `FIRST_ADDRESS` in the order in which they are made, as CUDA's do: among cached blocks of
    one size the lowest address is taken, and the peaks of recorded runs come out only with this order. An address is
    never used twice, so equal events give equal addresses, and an address names one segment for good.

    Attributes:
        capacity_bytes: What it can hand out in all.
        counters: Counters of all pools.
        segments: Those that exist, by address, ascending.
        history: Bytes handed out by each call so far, in order.
        calls: Number of calls that handed out memory, since they were last counted from zero.
        returns: Number of calls that gave memory back, likewise.
        observer: Told of segments made and given back, and of pages mapped and unmapped.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.counters = Counters()
        self.segments: dict[int, Segment] = {}
        self.history: list[int] = []
        self.calls = 0
        self.returns = 0
        self.observer: Observer | None = None
        self._next_address = FIRST_ADDRESS

    @property
    def free_bytes(self) -> int:
        """What it can still hand out."""
        return self.capacity_bytes - self.counters.reserved_bytes.current

    def take(self, pool: Pool, size_bytes: int) -> bool:
        """Hand out memory, or say that there is not enough."""
        if size_bytes > self.free_bytes:
            return False
        self.history.append(size_bytes)
        self.calls += 1
        for counters in (pool.counters, self.counters):
            counters.reserved_bytes.increase(size_bytes)
        return True

    def give_back(self, pool: Pool, size_bytes: int) -> None:
        """Take memory back."""
        self.returns += 1
        for counters in (pool.counters, self.counters):
            counters.reserved_bytes.decrease(size_bytes)

    def new_segment(self, free_list: FreeList, size_bytes: int, page_bytes: int, state: int) -> Segment:
        """Give a segment its addresses."""
        address = self._next_address
        self._next_address += -(-size_bytes // ADDRESS_ALIGNMENT_BYTES) * ADDRESS_ALIGNMENT_BYTES
        segment = self.segments[address] = Segment(address, size_bytes, page_bytes, free_list, state)
        return segment

    def malloc(self, free_list: FreeList, size_bytes: int) -> Block | None:
        """The one block of a new segment, in no list yet; None: not enough memory (cudaMalloc)."""
        if not self.take(free_list.pool, size_bytes):
            return None
        for counters in (free_list.pool.counters, self.counters):
            counters.segment.increase(1)
        segment = self.new_segment(free_list, size_bytes, 0, FREE)
        if self.observer is not None:
            self.observer("segment_alloc", segment.address, size_bytes, free_list.stream)
        return segment.head

    def free(self, block: Block) -> None:
        """Give the segment back of which `block` is all (cudaFree)."""
        segment = block.segment
        segment.free_list.remove(block)
        del self.segments[segment.address]
        self.give_back(segment.free_list.pool, segment.size_bytes)
        for counters in (segment.free_list.pool.counters, self.counters):
            counters.segment.decrease(1)
        if self.observer is not None:
            self.observer("segment_free", segment.address, segment.size_bytes, segment.free_list.stream)


def link(left: Block | None, right: Block | None, segment: Segment) -> None:
    """Make two blocks neighbours; None stands for the end of the segment on that side."""
    if right is not None:
        right.prev = left
        if left is None:
            segment.head = right
    if left is not None:
        left.next = right


def absorb(block: Block, other: Block | None) -> int:
    """Merge the neighbour `other` into `block` if both are free, or both unmapped (try_merge_blocks).

    `block` must be in no list at the time. Returns the bytes that came with it, 0 if they do not merge.
    """
    if other is None or other.state != block.state:
        return 0
    segment = block.segment
    if block.state == FREE:
        segment.free_list.remove(other)
    else:
        segment.free_list.unmapped.remove(other)
    if other is block.prev:
        block.address = other.address
        link(other.prev, block, segment)
    else:
        link(block, other.next, segment)
    block.size_bytes += other.size_bytes
    return other.size_bytes


def snapshot(card: Card) -> list[dict[str, Any]]:
    """Segments and their blocks by address, as `torch.cuda.memory_snapshot()` gives them.

    Each contiguous mapped range of an expandable segment is one segment (snapshot; torch/csrc/cuda/Module.cpp).
    """
    ranges: list[dict[str, Any]] = []
    for segment in card.segments.values():
        block: Block | None = segment.head
        while block is not None:
            if block.state != UNMAPPED:
                if block.prev is None or block.prev.state == UNMAPPED:
                    ranges.append(_range_entry(block))
                _add_block(ranges[-1], block)
            block = block.next
    return ranges


def _range_entry(head: Block) -> dict[str, Any]:
    return {
        "device": 0,
        "address": head.address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": head.stream,
        "segment_type": "small" if head.segment.free_list.pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": bool(head.segment.page_bytes),
        "frames": [],
        "blocks": [],
    }


def _add_block(entry: dict[str, Any], block: Block) -> None:
    size = block.size_bytes
    entry["total_size"] += size
    if block.state == ALLOCATED:
        entry["allocated_size"] += size
    if block.state != FREE:
        entry["active_size"] += size
        entry["requested_size"] += block.requested_bytes
    entry["blocks"].append(
        {
            "address": block.address,
            "size": size,
            "requested_size": block.requested_bytes,
            "state": _STATE_NAMES[block.state],
            "frames": [],
        }
    )
