"""The state in which a snapshot's trace begins, derived backwards from the state in which it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.snapshot import INACTIVE, WAITING, Snapshot
from bench.vgpu.allocator_config import MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig


@dataclass(slots=True)
class StartBlock:
    """A block that was handed out, or waited for another stream, before the first event.

    `size_bytes` is 0 while nobody knows more than what was asked for. `entry` is what the file has of it.
    """

    address: int
    stream: int
    pool: tuple[int, int]
    size_bytes: int
    requested_bytes: int
    waiting: bool
    entry: dict[str, Any]


@dataclass(slots=True)
class StartSegment:
    """A segment that existed before the first event, with its blocks by address, free ones left out."""

    address: int
    size_bytes: int
    stream: int
    pool: tuple[int, int]
    small: bool
    blocks: list[StartBlock] = field(default_factory=list)


@dataclass(frozen=True)
class Start:
    """What there was before the first event.

    Attributes:
        segments: By address; of expandable segments none.
        reserved_bytes: In all of them, expandable ones too.
        expandable: Whether there were expandable segments, whose blocks are in `loose`.
        loose: Blocks outside `segments`.
        contradictions: Events that the end state and the events after them rule out.
        derived: Blocks whose size is derived: a remainder too small to split looks like part of a free block after it.
    """

    segments: list[StartSegment]
    reserved_bytes: int
    expandable: bool
    loose: list[StartBlock]
    contradictions: int
    derived: int

    @property
    def blocks(self) -> list[StartBlock]:
        """All blocks, by address."""
        inside = [block for segment in self.segments for block in segment.blocks]
        return sorted([*inside, *self.loose], key=lambda block: block.address)

    @property
    def empty(self) -> bool:
        """Whether the trace begins with the first allocation."""
        return not self.reserved_bytes and not self.segments and not self.loose


def start_of(snapshot: Snapshot, config: AllocatorConfig) -> Start:
    """What there was before the first event of the trace, under the allocator's own configuration."""
    blocks = {
        block.address: StartBlock(
            block.address,
            segment.stream,
            segment.pool,
            block.size_bytes,
            block.requested_bytes,
            block.state in WAITING,
            block.entry,
        )
        for segment in snapshot.segments
        for block in segment.blocks
        if block.state != INACTIVE
    }
    segments = {
        segment.address: StartSegment(segment.address, segment.size_bytes, segment.stream, segment.pool, segment.small)
        for segment in snapshot.segments
        if not segment.expandable
    }
    mapped_bytes = sum(segment.size_bytes for segment in snapshot.segments if segment.expandable)
    contradictions = 0
    for event in reversed(snapshot.events):
        address, found = event.address, True
        if event.action == "alloc":
            found = blocks.pop(address, None) is not None
        elif event.action == "free_completed":
            found = address not in blocks
            blocks[address] = StartBlock(address, event.stream, event.pool, 0, event.size_bytes, True, event.entry)
        elif event.action == "free_requested":
            found = address in blocks
            if found:
                blocks[address].waiting = False
        elif event.action == "segment_alloc":
            found = segments.pop(address, None) is not None
        elif event.action == "segment_free":
            found = address not in segments
            small = event.size_bytes <= SMALL_SEGMENT_BYTES
            segments[address] = StartSegment(address, event.size_bytes, event.stream, event.pool, small)
        elif event.action in ("segment_map", "segment_unmap"):
            mapped_bytes += event.size_bytes if event.action == "segment_unmap" else -event.size_bytes
        contradictions += not found
    ordered = sorted(segments.values(), key=lambda segment: segment.address)
    loose = _distribute(sorted(blocks.values(), key=lambda block: block.address), ordered)
    derived = sum(not block.size_bytes for block in blocks.values())
    for segment in ordered:
        _fill_in_sizes(segment, config)
    reserved_bytes = max(0, mapped_bytes) + sum(segment.size_bytes for segment in ordered)
    return Start(ordered, reserved_bytes, mapped_bytes > 0, loose, contradictions, derived)


def _distribute(blocks: Sequence[StartBlock], segments: Sequence[StartSegment]) -> list[StartBlock]:
    """Put each block into its segment; those of no segment are left over. Both come by address."""
    loose = []
    following = iter(segments)
    segment = next(following, None)
    for block in blocks:
        while segment is not None and block.address >= segment.address + segment.size_bytes:
            segment = next(following, None)
        if segment is not None and block.address >= segment.address:
            segment.blocks.append(block)
        else:
            loose.append(block)
    return loose


def _fill_in_sizes(segment: StartSegment, config: AllocatorConfig) -> None:
    """Tell the sizes of blocks that the trace frees: what was asked for, rounded, and a remainder too small to split.

    A free block of the large pool is over 1 MiB, so a smaller gap belongs to the block before it
    (c10/cuda/CUDACachingAllocator.cpp, should_split, torch 2.13).
    """
    ends = [*(block.address for block in segment.blocks), segment.address + segment.size_bytes][1:]
    for block, end in zip(segment.blocks, ends, strict=True):
        if block.size_bytes:
            continue
        room_bytes = end - block.address
        size_bytes = min(config.rounded(max(1, block.requested_bytes)), room_bytes)
        least_free_bytes = MIN_BLOCK_BYTES if segment.small else SMALL_REQUEST_BYTES + 1
        unsplit = config.max_split_size_bytes is not None and size_bytes >= config.max_split_size_bytes
        block.size_bytes = room_bytes if unsplit or room_bytes - size_bytes < least_free_bytes else size_bytes
