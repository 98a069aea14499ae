"""What a BFC allocator is made of: chunks in regions, and the list of the free ones.

Rules from xla/tsl/framework/bfc_allocator.{h,cc} (`Chunk`, `Bin`, `AllocationRegion` there), with the header of the
TensorFlow 2.21 wheel.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

ADDRESS_BITS: Final = 64


class Chunk:
    """A range of a region that is either free or one block of the user's.

    Attributes:
        address: First byte.
        size_bytes: All of it, padding included.
        in_use: Whether it is handed out.
        prev: Chunk that ends where this one begins, in the same region.
        next: Chunk that begins where this one ends, in the same region.
    """

    __slots__ = ("address", "in_use", "next", "prev", "size_bytes")

    def __init__(self, address: int, size_bytes: int, prev: Chunk | None, next_: Chunk | None) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.in_use = False
        self.prev = prev
        self.next = next_


class FreeChunks:
    """All free chunks by size, then address.

    TensorFlow sorts them so within 21 bins (chunks of 256 B x 2^n up to the double of it, the last bin without an
    end), looks through the bin of the request from its smallest chunk on, then through the bins above. No chunk of a
    bin is larger than one of the next bin, so that finds the smallest chunk that fits, at the lowest address: what one
    list finds.

    Attributes:
        keys: `size_bytes << ADDRESS_BITS | address` of each chunk, ascending.
        chunks: The chunks, in the order of `keys`.
    """

    __slots__ = ("chunks", "keys")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.chunks: list[Chunk] = []

    def insert(self, chunk: Chunk) -> None:
        """Add a free chunk (InsertFreeChunkIntoBin)."""
        key = chunk.size_bytes << ADDRESS_BITS | chunk.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.chunks.insert(index, chunk)

    def remove(self, chunk: Chunk) -> None:
        """Take out a chunk that still has the size it was added with (RemoveFreeChunkFromBin)."""
        index = bisect_left(self.keys, chunk.size_bytes << ADDRESS_BITS | chunk.address)
        del self.keys[index], self.chunks[index]

    def largest_bytes(self) -> int:
        """Size of the largest free chunk, 0 without one (LargestFreeChunk)."""
        return self.chunks[-1].size_bytes if self.chunks else 0


class Region:
    """Memory that one call of the sub-allocator gave; never joined with another, nor are chunks across the border.

    (`SupportsCoalescing` is false of both sub-allocators: `DeviceMemAllocator` in
    xla/stream_executor/integrations/device_mem_allocator.h, and the one of the CPU's allocator in
    tensorflow/core/common_runtime/pool_allocator.h.)

    Attributes:
        first: Its first chunk, which stays the first for as long as the region lives.
        size_bytes: All of it.
    """

    __slots__ = ("first", "size_bytes")

    def __init__(self, first: Chunk, size_bytes: int) -> None:
        self.first = first
        self.size_bytes = size_bytes

    def is_free(self) -> bool:
        """Whether nothing of it is in use: neighbours that are free are one chunk, so that the first is then all."""
        return not self.first.in_use and self.first.next is None
