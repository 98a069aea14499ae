"""A simulator of TensorFlow's BFC allocator (best fit with coalescing), exact to the byte and the address.

Follows `BFCAllocator` in xla/tsl/framework/bfc_allocator.cc (the copies in tensorflow/tensorflow's third_party/xla of
2024 and in openxla/xla of 2026 agree in every rule here; constants and members checked with the header of the
TensorFlow 2.21 wheel). Each function names the one that it follows. Left out: the experimental options
`timestamped_allocator` and `internal_fragmentation_fraction`, spatial partitioning (of JAX's newest releases), and
waiting up to 10 s for another thread to free something.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from bench.bfc.chunks import ADDRESS_BITS, Chunk, FreeChunks, Region
from bench.bfc.sub_allocator import Card, SubAllocator

ROUNDING_BYTES: Final = 256
"""Sizes are multiples of it (kMinAllocationSize)."""
FIRST_REGION_BYTES: Final = 2 * 2**20
"""Size of the first region of an allocator that grows (the constructor)."""
MAX_PADDING_BYTES: Final = 128 * 2**20
"""A chunk that exceeds the request by this much is split though it is not twice as large (FindChunkPtr)."""


@dataclass(eq=False)
class BfcExhausted(Exception):
    """No chunk fits, and no region can be added: the real allocator returns a null pointer.

    Attributes:
        name: Of the allocator.
        requested_bytes: What was asked for.
        rounded_bytes: That, rounded up.
        limit_bytes: What the allocator may hold.
        pool_bytes: What it holds, in regions.
        bytes_in_use: What of that is handed out, in chunks.
        largest_free_bytes: Its largest free chunk.
    """

    name: str
    requested_bytes: int
    rounded_bytes: int
    limit_bytes: int
    pool_bytes: int
    bytes_in_use: int
    largest_free_bytes: int

    def __str__(self) -> str:
        """TensorFlow's own words (AllocateRawInternal; "OOM when allocating" from OpKernelContext), and the sizes."""
        return (
            f"OOM when allocating: Allocator ({self.name}) ran out of memory trying to allocate "
            f"{human_bytes(self.requested_bytes)} (rounded to {self.rounded_bytes}); "
            f"{self.bytes_in_use} bytes in use of a pool of {self.pool_bytes} and a limit of {self.limit_bytes}, "
            f"largest free chunk {self.largest_free_bytes}"
        )


def human_bytes(num_bytes: int) -> str:
    """A size as TensorFlow prints it (HumanReadableNumBytes in tsl/platform/numbers.cc): `12B`, `1.5KiB`, `2.00MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes}B"
    units = iter("KMGTPE")
    unit = next(units)
    while num_bytes >= 1024 * 1024:
        num_bytes //= 1024
        unit = next(units)
    return f"{num_bytes / 1024:.{1 if unit == 'K' else 2}f}{unit}iB"


class BfcAllocator:
    """The allocator of one process on one card.

    Equal calls give equal bytes and equal addresses. Not safe to use from several threads at once.

    Attributes:
        limit_bytes: What it may hold.
        bytes_in_use: In chunks handed out, their padding included.
        peak_bytes_in_use: Highest `bytes_in_use`, what `get_memory_info` calls the peak.
        pool_bytes: What it holds of the card, in regions.
        peak_pool_bytes: Highest `pool_bytes`.
        largest_alloc_bytes: Largest chunk handed out.
        num_allocs: Chunks handed out.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        growth: bool,
        garbage_collection: bool = False,
        sub_allocator: SubAllocator | None = None,
        name: str = "GPU_0_bfc",
    ) -> None:
        """Start with nothing held (the constructor and `BFCAllocator::Options`).

        Args:
            limit_bytes: What it may hold.
            growth: Take regions as they are needed, from 2 MiB on; otherwise the whole limit at the first request.
            garbage_collection: Give regions of which nothing is in use back before giving up. True of a GPU's
                allocator unless TF_ENABLE_GPU_GARBAGE_COLLECTION is false, false of the CPU's.
            sub_allocator: Where regions come from; None: a card without an end.
            name: For messages.

        Raises:
            ValueError: A limit below 1.
        """
        if limit_bytes < 1:
            raise ValueError(f"a limit of {limit_bytes} bytes holds nothing")
        self.limit_bytes = limit_bytes
        self.bytes_in_use = self.peak_bytes_in_use = 0
        self.pool_bytes = self.peak_pool_bytes = 0
        self.largest_alloc_bytes = self.num_allocs = 0
        self._name = name
        self._garbage_collection = garbage_collection
        self._sub_allocator = Card() if sub_allocator is None else sub_allocator
        self._next_region_bytes = rounded(min(limit_bytes, FIRST_REGION_BYTES) if growth else limit_bytes)
        self._free = FreeChunks()
        self._used: dict[int, Chunk] = {}
        self._regions: list[Region] = []

    def allocate(self, num_bytes: int) -> int:
        """Address of a chunk of at least `num_bytes` (AllocateRawInternal, FindChunkPtr).

        Raises:
            ValueError: Less than 1 byte, for which the real allocator has no chunk and no error.
            BfcExhausted: There is no room.
        """
        if num_bytes < 1:
            raise ValueError(f"there is no chunk of {num_bytes} bytes")
        size = (num_bytes + ROUNDING_BYTES - 1) & -ROUNDING_BYTES
        free = self._free
        index = bisect_left(free.keys, size << ADDRESS_BITS)
        if index == len(free.keys):
            if not (self._extend(size) or (self._free_regions(size) and self._extend(size))):
                raise self._exhausted(num_bytes, size)
            index = bisect_left(free.keys, size << ADDRESS_BITS)
        del free.keys[index]
        chunk = free.chunks.pop(index)
        chunk_bytes = chunk.size_bytes
        if chunk_bytes >= 2 * size or chunk_bytes - size >= MAX_PADDING_BYTES:
            self._split(chunk, size)
            chunk_bytes = size
        chunk.in_use = True
        self._used[chunk.address] = chunk
        self.num_allocs += 1
        self.bytes_in_use += chunk_bytes
        if self.bytes_in_use > self.peak_bytes_in_use:
            self.peak_bytes_in_use = self.bytes_in_use
        if chunk_bytes > self.largest_alloc_bytes:
            self.largest_alloc_bytes = chunk_bytes
        return chunk.address

    def free(self, address: int) -> None:
        """Take a chunk back and merge it with its free neighbours (DeallocateRawInternal, TryToCoalesce).

        Raises:
            ValueError: Nothing is handed out at that address.
        """
        chunk = self._used.pop(address, None)
        if chunk is None:
            raise ValueError(f"no chunk is handed out at {address:#x}")
        chunk.in_use = False
        self.bytes_in_use -= chunk.size_bytes
        after = chunk.next
        if after is not None and not after.in_use:
            self._free.remove(after)
            _merge(chunk, after)
        before = chunk.prev
        if before is not None and not before.in_use:
            self._free.remove(before)
            _merge(before, chunk)
            chunk = before
        self._free.insert(chunk)

    def size_of(self, address: int) -> int:
        """Bytes of the chunk handed out at an address, padding included (AllocatedSize).

        Raises:
            ValueError: Nothing is handed out at that address.
        """
        chunk = self._used.get(address)
        if chunk is None:
            raise ValueError(f"no chunk is handed out at {address:#x}")
        return chunk.size_bytes

    def regions(self) -> list[tuple[int, int]]:
        """Address and bytes of every region, in the order in which they were taken."""
        return [(region.first.address, region.size_bytes) for region in self._regions]

    def chunks(self) -> list[tuple[int, int, bool]]:
        """Address, bytes and whether it is in use, of every chunk, by region and address (RecordMemoryMap)."""
        found = []
        for region in self._regions:
            chunk: Chunk | None = region.first
            while chunk is not None:
                found.append((chunk.address, chunk.size_bytes, chunk.in_use))
                chunk = chunk.next
        return found

    def clear_stats(self) -> None:
        """Start counts at zero and the peak in use at the present (ClearStats, under `reset_memory_stats`)."""
        self.num_allocs = self.largest_alloc_bytes = 0
        self.peak_bytes_in_use = self.bytes_in_use

    def _split(self, chunk: Chunk, size: int) -> None:
        """Cut a chunk that is in no list to `size`; the rest becomes a free chunk (SplitChunk)."""
        rest = Chunk(chunk.address + size, chunk.size_bytes - size, chunk, chunk.next)
        if rest.next is not None:
            rest.next.prev = rest
        chunk.next = rest
        chunk.size_bytes = size
        self._free.insert(rest)

    def _extend(self, size: int) -> bool:
        """Add a region that holds `size` bytes, if the limit and the card allow (Extend).

        The size of the next region doubles with every region, whether the doubling was needed for the request or not.
        """
        available_bytes = (self.limit_bytes - self.pool_bytes) // ROUNDING_BYTES * ROUNDING_BYTES
        if size > available_bytes:
            return False
        increased = False
        while size > self._next_region_bytes:
            self._next_region_bytes *= 2
            increased = True
        region_bytes = min(self._next_region_bytes, available_bytes)
        address = self._sub_allocator.alloc(region_bytes)
        while address is None:
            region_bytes = backed_off(region_bytes)
            if region_bytes < size:
                return False
            address = self._sub_allocator.alloc(region_bytes)
        if not increased:
            self._next_region_bytes *= 2
        self.pool_bytes += region_bytes
        self.peak_pool_bytes = max(self.peak_pool_bytes, self.pool_bytes)
        chunk = Chunk(address, region_bytes, None, None)
        self._regions.append(Region(chunk, region_bytes))
        self._free.insert(chunk)
        return True

    def _free_regions(self, size: int) -> bool:
        """Give back all regions of which nothing is in use, if that could help (DeallocateFreeRegions)."""
        if not self._garbage_collection:
            return False
        free = [region for region in self._regions if region.is_free()]
        free_bytes = sum(region.size_bytes for region in free)
        if not free or size > self.limit_bytes - self.pool_bytes + free_bytes:
            return False
        for region in free:
            self._free.remove(region.first)
            self._sub_allocator.free(region.first.address, region.size_bytes)
        self._regions = [region for region in self._regions if not region.is_free()]
        self.pool_bytes -= free_bytes
        return True

    def _exhausted(self, num_bytes: int, size: int) -> BfcExhausted:
        return BfcExhausted(  # by position, which is what pickle keeps of an exception
            self._name,
            num_bytes,
            size,
            self.limit_bytes,
            self.pool_bytes,
            self.bytes_in_use,
            self._free.largest_bytes(),
        )


def rounded(num_bytes: int) -> int:
    """The next multiple of 256 (RoundedBytes)."""
    return -(-num_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def backed_off(region_bytes: int) -> int:
    """What is tried after the sub-allocator had no region of this size: 0.9 of it, in single precision (Extend).

    Newer sources make it smaller by at least 256 bytes; older ones would not come to an end below 2,560 bytes.
    """
    reduced = int(_single(_single(region_bytes) * _single(0.9)))
    return min(rounded(reduced), region_bytes - ROUNDING_BYTES)


def _single(value: float) -> float:
    """The nearest number of single precision."""
    (nearest,) = struct.unpack("f", struct.pack("f", value))
    return float(nearest)


def _merge(chunk: Chunk, after: Chunk) -> None:
    """Make a free chunk and the free one behind it one (Merge)."""
    chunk.size_bytes += after.size_bytes
    chunk.next = after.next
    if after.next is not None:
        after.next.prev = chunk
