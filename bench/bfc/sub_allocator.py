"""Where a BFC allocator has its regions from: the card, of which something else may hold a part."""

from __future__ import annotations

from typing import Final, Protocol

FIRST_ADDRESS: Final = 0x7000_0000_0000  # any value will do; CUDA's addresses look like this
ADDRESS_ALIGNMENT_BYTES: Final = 2 * 2**20  # no rule of the allocator looks at it


class SubAllocator(Protocol):
    """Gives and takes back whole regions (`SubAllocator` in xla/tsl/framework/allocator.h)."""

    def alloc(self, size_bytes: int) -> int | None:
        """Address of a new region, or None where there is no room for it."""

    def free(self, address: int, size_bytes: int) -> None:
        """Take a region back."""


class Card:
    """Memory that is handed out for as long as the sum of sizes allows; addresses ascend and are never used twice.

    Two free chunks of one size in different regions are told apart by address. A real sub-allocator's addresses may
    come in another order (the C library's often descend): to follow one run exactly, give the addresses of that run.

    Attributes:
        capacity_bytes: What it can hand out in all; None: no end.
        taken_bytes: What it has handed out.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"a card cannot have {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self._next_address = FIRST_ADDRESS

    def alloc(self, size_bytes: int) -> int | None:
        """Address of a new region, or None where there is no room for it."""
        if self.capacity_bytes is not None and self.taken_bytes + size_bytes > self.capacity_bytes:
            return None
        self.taken_bytes += size_bytes
        address = self._next_address
        pages = -(-size_bytes // ADDRESS_ALIGNMENT_BYTES) + 1  # a free page between: regions do not touch
        self._next_address += pages * ADDRESS_ALIGNMENT_BYTES
        return address

    def free(self, address: int, size_bytes: int) -> None:
        """Take a region back."""
        self.taken_bytes -= size_bytes
