"""Runs a trace of allocations and deallocations through a BFC allocator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from bench.bfc.allocator import BfcAllocator, BfcExhausted


class Event(NamedTuple):
    """One step of a trace.

    Attributes:
        block: Names the block for as long as it lives; the address in the run that was traced, say.
        num_bytes: What the block was asked for with; 0: the block is given back.
    """

    block: int
    num_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What came of a replay, in bytes.

    Attributes:
        events: How many were replayed: all, or those before the one that ran out of memory.
        peak_bytes_in_use: Highest bytes in chunks handed out.
        peak_at: Number of the event, from 0, that brought it about; -1: it was there before the first.
        peak_pool_bytes: Highest bytes held of the card.
        end_bytes_in_use: In chunks handed out at the end.
        end_pool_bytes: Held of the card at the end.
        exhausted: The request that could not be served, which is event number `events`; None: all were.
    """

    events: int
    peak_bytes_in_use: int
    peak_at: int
    peak_pool_bytes: int
    end_bytes_in_use: int
    end_pool_bytes: int
    exhausted: BfcExhausted | None


def replay(events: Iterable[Event], allocator: BfcAllocator) -> Outcome:
    """Do what a trace did, in its order, up to the first request that finds no room.

    The allocator may hold something before; that counts.

    Raises:
        ValueError: A block is asked for while it lives, or given back while it does not.
    """
    allocate, free = allocator.allocate, allocator.free
    addresses: dict[int, int] = {}
    highest_bytes = allocator.peak_bytes_in_use
    peak_at = number = -1
    exhausted = None
    for number, (block, num_bytes) in enumerate(events):
        if num_bytes:
            if block in addresses:
                raise ValueError(f"event {number}: block {block:#x} is asked for while it lives")
            try:
                addresses[block] = allocate(num_bytes)
            except BfcExhausted as error:
                exhausted = error
                number -= 1
                break
            if allocator.peak_bytes_in_use > highest_bytes:
                highest_bytes = allocator.peak_bytes_in_use
                peak_at = number
        else:
            address = addresses.pop(block, None)
            if address is None:
                raise ValueError(f"event {number}: block {block:#x} is given back while it does not live")
            free(address)
    return Outcome(
        events=number + 1,
        peak_bytes_in_use=allocator.peak_bytes_in_use,
        peak_at=peak_at,
        peak_pool_bytes=allocator.peak_pool_bytes,
        end_bytes_in_use=allocator.bytes_in_use,
        end_pool_bytes=allocator.pool_bytes,
        exhausted=exhausted,
    )
