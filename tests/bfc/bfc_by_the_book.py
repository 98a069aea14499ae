"""BFCAllocator written down again as its source has it, bins and all, for speed of reading and not of running."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.bfc import SubAllocator

NUM_BINS = 21


@dataclass
class BookChunk:
    ptr: int
    size: int
    region: int
    in_use: bool = False


class BookAllocator:
    """Chunks by address; a region is named by its first address. `allocate` gives None where there is no room."""

    def __init__(self, limit: int, *, growth: bool, garbage_collection: bool, sub_allocator: SubAllocator) -> None:
        self.limit = limit
        self.garbage_collection = garbage_collection
        self.sub_allocator = sub_allocator
        self.curr_region = round_up(min(limit, 2 << 20) if growth else limit)
        self.pool = self.in_use = self.peak = 0
        self.chunks: dict[int, BookChunk] = {}

    def bins(self) -> list[list[BookChunk]]:
        bins: list[list[BookChunk]] = [[] for _ in range(NUM_BINS)]
        for chunk in self.chunks.values():
            if not chunk.in_use:
                bins[bin_for_size(chunk.size)].append(chunk)
        return [sorted(chunks, key=lambda chunk: (chunk.size, chunk.ptr)) for chunks in bins]

    def neighbour(self, chunk: BookChunk, ptr: int) -> BookChunk | None:
        other = self.chunks.get(ptr)
        return other if other is not None and other.region == chunk.region else None

    def allocate(self, num_bytes: int) -> int | None:
        size = round_up(num_bytes)
        ptr = self.find(size)
        if ptr is None and self.extend(size):
            ptr = self.find(size)
        if ptr is None and self.deallocate_free_regions(size) and self.extend(size):
            ptr = self.find(size)
        return ptr

    def find(self, size: int) -> int | None:
        bins = self.bins()
        for number in range(bin_for_size(size), NUM_BINS):
            for chunk in bins[number]:
                if chunk.size >= size:
                    if chunk.size >= size * 2 or chunk.size - size >= 128 << 20:
                        rest = BookChunk(chunk.ptr + size, chunk.size - size, chunk.region)
                        self.chunks[rest.ptr] = rest
                        chunk.size = size
                    chunk.in_use = True
                    self.in_use += chunk.size
                    self.peak = max(self.peak, self.in_use)
                    return chunk.ptr
        return None

    def extend(self, size: int) -> bool:
        available = (self.limit - self.pool) // 256 * 256
        if size > available:
            return False
        increased = False
        while size > self.curr_region:
            self.curr_region *= 2
            increased = True
        region = min(self.curr_region, available)
        ptr = self.sub_allocator.alloc(region)
        while ptr is None:
            region = min(round_up(int(np.float32(region) * np.float32(0.9))), region - 256)
            if region < size:
                return False
            ptr = self.sub_allocator.alloc(region)
        if not increased:
            self.curr_region *= 2
        self.pool += region
        self.chunks[ptr] = BookChunk(ptr, region, ptr)
        return True

    def deallocate_free_regions(self, size: int) -> bool:
        if not self.garbage_collection:
            return False
        used = {chunk.region for chunk in self.chunks.values() if chunk.in_use}
        free = [chunk for chunk in self.chunks.values() if chunk.region not in used]
        total = sum(chunk.size for chunk in free)
        if total == 0 or size > self.limit - self.pool + total:
            return False
        for chunk in free:
            del self.chunks[chunk.ptr]
        for region in {chunk.region for chunk in free}:
            region_bytes = sum(chunk.size for chunk in free if chunk.region == region)
            self.sub_allocator.free(region, region_bytes)
            self.pool -= region_bytes
        return True

    def free(self, ptr: int) -> None:
        chunk = self.chunks[ptr]
        chunk.in_use = False
        self.in_use -= chunk.size
        after = self.neighbour(chunk, ptr + chunk.size)
        if after is not None and not after.in_use:
            del self.chunks[after.ptr]
            chunk.size += after.size
        for before in list(self.chunks.values()):
            if before.ptr + before.size == ptr and before.region == chunk.region and not before.in_use:
                del self.chunks[ptr]
                before.size += chunk.size


def round_up(num_bytes: int) -> int:
    return 256 * ((num_bytes + 255) // 256)


def bin_for_size(num_bytes: int) -> int:
    return min(NUM_BINS - 1, (max(num_bytes, 256) >> 8).bit_length() - 1)
