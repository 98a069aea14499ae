"""Puts a caching allocator into a state that was seen elsewhere: segments at given addresses, blocks in them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from bench.vgpu.allocator import Block, CachingAllocator
from bench.vgpu.segments import ADDRESS_ALIGNMENT_BYTES, ALLOCATED, FREE


class Piece(NamedTuple):
    """A block to be: its size and what was asked for; 0: it is free."""

    size_bytes: int
    requested_bytes: int


class Placement:
    """Chooses the addresses of an allocator's next segments: among free blocks of one size the lowest address wins.

    Observes the allocator, so that no two segments overlap.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._card = allocator._card
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._top = self._card._next_address
        allocator.observe(self._follow)

    def next_at(self, address: int | None, size_bytes: int = 0) -> None:
        """Put the next segment at `address` if that is free, else above all others."""
        if address is None or not self._is_free(address, size_bytes):
            address = self._top
        self._card._next_address = address

    def restore(self, address: int, size_bytes: int, stream: int, small: bool, pieces: Sequence[Piece]) -> list[Block]:
        """Make a segment of these pieces, which fill it; the handles of those that are allocated, in order.

        Raises:
            ValueError: There is no room for it, or its pieces do not fill it.
        """
        allocator = self._allocator
        if sum(piece.size_bytes for piece in pieces) != size_bytes or not pieces:
            raise ValueError(f"the pieces of a segment of {size_bytes} bytes do not fill it")
        self.next_at(address, size_bytes)
        free_list = (allocator._small if small else allocator._large).list_of(stream)
        rest = self._card.malloc(free_list, size_bytes)
        if rest is None:
            raise ValueError(f"no room for a segment of {size_bytes} bytes")
        blocks = []
        for piece in pieces[:-1]:
            blocks.append(allocator._split(rest, piece.size_bytes, -1))
            free_list.remove(rest)
        rest.state = ALLOCATED
        blocks.append(rest)
        for block, piece in zip(blocks, pieces, strict=True):
            block.requested_bytes = piece.requested_bytes or piece.size_bytes
            for counters in (free_list.pool.counters, allocator._counters):
                counters.take(block.size_bytes, block.requested_bytes, 0, 0)
        for block, piece in zip(blocks, pieces, strict=True):
            if not piece.requested_bytes:
                allocator.free(block)
        return [block for block, piece in zip(blocks, pieces, strict=True) if piece.requested_bytes]

    def release(self, address: int) -> bool:
        """Give the segment at `address` back; False: there is none, or it is in use."""
        for waited in self._allocator._waiting.passed():
            self._allocator._wait_over(waited)
        segment = self._card.segments.get(address)
        if segment is None or segment.head.state != FREE or segment.head.next is not None:
            return False
        self._allocator._release(segment.head)
        return True

    def _is_free(self, address: int, size_bytes: int) -> bool:
        index = bisect_left(self._starts, address)
        below = index == 0 or self._ends[self._starts[index - 1]] <= address
        return below and (index == len(self._starts) or address + size_bytes <= self._starts[index])

    def _follow(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        if action == "segment_alloc":
            insort(self._starts, address)
            end = address + -(-size_bytes // ADDRESS_ALIGNMENT_BYTES) * ADDRESS_ALIGNMENT_BYTES
            self._ends[address] = end
            self._top = max(self._top, end)
        elif action == "segment_free":
            del self._starts[bisect_left(self._starts, address)]
            del self._ends[address]
