"""Runs the trace of a snapshot through the caching allocator, as it was configured or otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from bench.snapshot import MAX_BYTES, Event, Snapshot
from bench.vgpu.allocator import AllocatorConfig, Block, CachingAllocator, OutOfMemory
from bench.vgpu.restore import Piece, Placement
from bench.window import Start, StartBlock, StartSegment

UNLIMITED_BYTES = MAX_BYTES
MAX_LIVE = 200_000
"""Blocks alive at once; a trace with more is refused, as what it costs grows with their square."""

_RELEASES = ("segment_free", "segment_unmap")
_GROWTHS = ("segment_alloc", "segment_map")
_FIRST_WAITING_STREAM = 2**40  # streams that blocks wait for, one each; no stream of a trace is numbered so


class CannotReplay(ValueError):
    """More blocks live at once than `MAX_LIVE`, or blocks where they cannot be; the message is one line."""


@dataclass(frozen=True)
class Failure:
    """Where memory ran out, or would have.

    Attributes:
        index: Number of the event, from 0.
        event: What asked.
        tried_bytes: What cudaMalloc was asked for.
        allocated_bytes: In blocks, then.
        reserved_bytes: In segments, then.
        free_bytes: What the card had left.
    """

    index: int
    event: Event
    tried_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What came of a replay, in bytes.

    Attributes:
        events: How many were replayed: all, or those before the one that ran out of memory.
        peak_reserved_bytes: Highest bytes in segments.
        fragmentation_bytes: Reserved less allocated when `peak_reserved_bytes` was first reached.
        peak_allocated_bytes: Highest bytes in blocks.
        peak_allocated_at: The event that brought it about; -1: it was there before the first.
        end_reserved_bytes: In segments at the end.
        end_allocated_bytes: In blocks at the end.
        retries: Requests for which everything cached had to be released.
        failure: The request that the card could not serve; None: all were served.
        served: Requests that failed when recorded, and were served here.
        unmatched: Frees of blocks that the trace does not tell of.
        live: What lived where the replay was to stop: each block and what the file has of it.
    """

    events: int
    peak_reserved_bytes: int
    fragmentation_bytes: int
    peak_allocated_bytes: int
    peak_allocated_at: int
    end_reserved_bytes: int
    end_allocated_bytes: int
    retries: int
    failure: Failure | None
    served: int
    unmatched: int
    live: list[tuple[Block, dict[str, Any]]]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        failure = None if self.failure is None else _integers(self.failure)
        return _integers(self) | {"failure": failure}


@dataclass(frozen=True)
class Plan:
    """How to replay a trace.

    Attributes:
        snapshot: Whose trace.
        start: What there was before it.
        config: Configuration of the allocator.
        capacity_bytes: What the card can hand out in all; None: more than will be asked for.
        total_bytes: The card's memory, of which a memory fraction is taken; None: `capacity_bytes`.
        own: Whether this is how it was recorded: then segments lie at their recorded addresses.
        recorded_limit_bytes: What the recording's allocator could reserve, at the least.
        collected: Whether it released old segments by itself (garbage_collection_threshold).
    """

    snapshot: Snapshot
    start: Start
    config: AllocatorConfig
    capacity_bytes: int | None
    total_bytes: int | None
    own: bool
    recorded_limit_bytes: int
    collected: bool


def replay(plan: Plan, stop_after: int | None = None) -> Outcome:
    """Replay a trace, to its end or to the event numbered `stop_after`.

    Raises:
        CannotReplay: See there.
    """
    return _Replay(plan).run(stop_after)


def recorded_capacity(snapshot: Snapshot, start: Start) -> tuple[int | None, int]:
    """What the card of the recording could hand out, if that can be told; and the most that was reserved.

    Where memory ran out, the card had what was reserved and what it said was free.
    """
    reserved = peak = start.reserved_bytes
    known = snapshot.capacity_bytes
    for event in snapshot.events:
        if event.action in _GROWTHS:
            reserved += event.size_bytes
            peak = max(peak, reserved)
        elif event.action in _RELEASES:
            reserved -= event.size_bytes
        elif event.action == "oom" and known is None:
            known = max(reserved + event.address, peak)
    return known, peak


class _Point:
    """A stream's work up to where a block was freed."""

    passed = False

    def query(self) -> bool:
        return self.passed


class _Replay:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._events = plan.snapshot.events
        self._streams: dict[tuple[int, tuple[int, int]], int] = {(0, (0, 0)): 0}
        self._points: dict[int, _Point] = {}  # by the stream that a block waits for
        self._waiting: dict[int, _Point] = {}  # by the block's address in the trace
        self._late: list[_Point] = []
        self._live: dict[int, tuple[Block, dict[str, Any]]] = {}
        self._recorded_reserved = plan.start.reserved_bytes
        self._served = self._unmatched = self._retries = 0
        self._failure: Failure | None = None
        capacity_bytes = UNLIMITED_BYTES if plan.capacity_bytes is None else plan.capacity_bytes
        self._allocator = CachingAllocator(
            capacity_bytes,
            config=plan.config,
            record_event=self._points.__getitem__,
            total_bytes=plan.total_bytes,
        )
        self._placement = Placement(self._allocator) if plan.own and not plan.config.expandable_segments else None
        self._last_allocation = max((i for i, event in enumerate(self._events) if event.action == "alloc"), default=-1)
        self._completed_until = 0  # up to here the events after the latest free_completed are of that kind
        self._peak_allocated_at = -1
        self._peak_allocated = self._peak_reserved = self._fragmentation = 0

    def run(self, stop_after: int | None) -> Outcome:
        events = self._events
        self._begin()
        index = 0
        last = len(events) - 1 if stop_after is None else stop_after
        while index <= last and self._failure is None:
            index = self._step(index)
            self._observe_peaks(index - 1)
        allocator = self._allocator
        return Outcome(
            events=len(events) if self._failure is None else self._failure.index,
            peak_reserved_bytes=max(self._peak_reserved, allocator.peak_reserved_bytes),
            fragmentation_bytes=self._fragmentation,
            peak_allocated_bytes=self._peak_allocated,
            peak_allocated_at=self._peak_allocated_at,
            end_reserved_bytes=allocator.reserved_bytes,
            end_allocated_bytes=allocator.allocated_bytes,
            retries=allocator.num_alloc_retries + self._retries,
            failure=self._failure,
            served=self._served,
            unmatched=self._unmatched,
            live=list(self._live.values()),
        )

    def _begin(self) -> None:
        """Bring about the state in which the trace begins; under another configuration, its blocks are made anew."""
        start = self._plan.start
        if self._placement is not None:
            for segment in start.segments:
                self._restore(segment)
        for block in start.blocks if self._placement is None else start.loose:
            self._make(block)
        self._allocator.reset_peak_stats()
        self._observe_peaks(-1)

    def _make(self, block: StartBlock) -> None:
        event = Event("alloc", block.address, block.requested_bytes, block.stream, block.pool, block.entry)
        self._allocate(-1, event)
        if block.waiting and block.address in self._live:
            self._wait(block.address)

    def _restore(self, segment: StartSegment) -> None:
        """A segment with its blocks, and what lies between them free."""
        assert self._placement is not None
        pieces: list[Piece] = []
        at = segment.address
        for block in segment.blocks:
            if block.address > at:
                pieces.append(Piece(block.address - at, 0))
            pieces.append(Piece(block.size_bytes, max(1, block.requested_bytes)))
            at = block.address + block.size_bytes
        if at < segment.address + segment.size_bytes:
            pieces.append(Piece(segment.address + segment.size_bytes - at, 0))
        stream = self._stream(segment.stream, segment.pool)
        try:
            made = self._placement.restore(segment.address, segment.size_bytes, stream, segment.small, pieces)
        except ValueError as error:
            raise CannotReplay(f"its trace does not lead to its segments: {error}") from error
        for handle, block in zip(made, segment.blocks, strict=True):
            self._live[block.address] = handle, block.entry
            if block.waiting:
                self._wait(block.address)

    def _step(self, index: int) -> int:
        """Do what an event says; returns the index of the next event to look at."""
        event = self._events[index]
        action = event.action
        if action == "alloc":
            self._allocate(index, event)
        elif action == "free_requested":
            return self._free(index, event)
        elif action == "free_completed":
            self._complete(index, event)
        elif action in _GROWTHS:
            self._recorded_reserved += event.size_bytes
            if self._placement is not None and action == "segment_alloc":
                self._placement.next_at(event.address, event.size_bytes)
        elif action in _RELEASES:
            return self._release(index)
        elif action == "oom":
            self._ask_again(index, event)
        return index + 1

    def _allocate(self, index: int, event: Event) -> None:
        if event.address in self._live:  # its free is not in the trace
            self._unmatched += 1
            self._allocator.free(self._live.pop(event.address)[0])
        if len(self._live) >= MAX_LIVE:
            raise CannotReplay(f"more than {MAX_LIVE:,} blocks live at once")
        try:
            block = self._allocator.allocate(max(1, event.size_bytes), self._stream(event.stream, event.pool))
        except OutOfMemory as failure:
            self._failure = _failure(index, event, failure)
            return
        self._live[event.address] = block, event.entry
        if self._placement is not None:
            self._placement.next_at(None)
        self._pass_late()

    def _free(self, index: int, event: Event) -> int:
        if event.address not in self._live:
            self._unmatched += 1
            return index + 1
        following = self._events[index + 1] if index + 1 < len(self._events) else None
        if following is not None and (following.action, following.address) == ("free_completed", event.address):
            self._allocator.free(self._live.pop(event.address)[0])
            return index + 2
        self._wait(event.address)
        return index + 1

    def _wait(self, address: int) -> None:
        """Free a block that another stream still uses."""
        block = self._live.pop(address)[0]
        stream = _FIRST_WAITING_STREAM + len(self._points)
        self._waiting[address] = self._points[stream] = _Point()
        self._allocator.record_stream(block, stream)
        self._allocator.free(block)

    def _complete(self, index: int, event: Event) -> None:
        """The other streams have passed; where segments are released next, the allocator has waited for them itself."""
        if event.address in self._live:  # what was requested is not in the trace
            self._allocator.free(self._live.pop(event.address)[0])
            return
        point = self._waiting.pop(event.address, None)
        if point is None:
            self._unmatched += 1
        elif self._next_action(index) in _RELEASES:
            self._late.append(point)
        else:
            point.passed = True

    def _next_action(self, index: int) -> str:
        """The next action that is not the end of a wait too."""
        at = max(index + 1, self._completed_until)
        while at < len(self._events) and self._events[at].action == "free_completed":
            at += 1
        self._completed_until = at
        return self._events[at].action if at < len(self._events) else ""

    def _pass_late(self) -> None:
        for point in self._late:
            point.passed = True
        self._late.clear()

    def _release(self, index: int) -> int:
        """Segments were given back, by the program or because a request found the card full.

        As it was configured, the allocator gives the same ones back. Otherwise it decides for itself what a request
        needs, if it knows how much the card has.
        """
        events = self._events
        end = index
        while end < len(events) and events[end].action in _RELEASES:
            end += 1
        burst = events[index:end]
        wanted_bytes = 0
        growth = end
        while growth < len(events) and events[growth].action in _GROWTHS:
            wanted_bytes += events[growth].size_bytes
            growth += 1
        failed = end < len(events) and events[end].action == "oom"
        full = failed or (wanted_bytes and self._recorded_reserved + wanted_bytes > self._plan.recorded_limit_bytes)
        collected = self._plan.collected and wanted_bytes
        self._recorded_reserved -= sum(event.size_bytes for event in burst)
        if (full or collected) and not self._plan.own and self._plan.capacity_bytes is not None:
            return end
        self._retries += bool(full and not failed)  # the request itself, which comes next, finds room now
        if self._placement is None:
            self._allocator.empty_cache()
        else:
            self._pass_late()
            self._unmatched += sum(not self._placement.release(event.address) for event in burst)
        return end

    def _ask_again(self, index: int, event: Event) -> None:
        """What failed when it was recorded; where allocations follow, the program went on without it."""
        try:
            block = self._allocator.allocate(max(1, event.size_bytes), self._stream(event.stream, event.pool))
        except OutOfMemory as failure:
            if index > self._last_allocation:
                self._failure = _failure(index, event, failure)
        else:
            self._served += 1
            self._allocator.free(block)

    def _stream(self, stream: int, pool: tuple[int, int]) -> int:
        """A number of its own for each stream of each pool: none takes another one's blocks."""
        return self._streams.setdefault((stream, pool), len(self._streams))

    def _observe_peaks(self, index: int) -> None:
        allocator = self._allocator
        allocated, reserved = allocator.allocated_bytes, allocator.reserved_bytes
        if allocated > self._peak_allocated:
            self._peak_allocated, self._peak_allocated_at = allocated, index
        if reserved > self._peak_reserved:
            self._peak_reserved, self._fragmentation = reserved, reserved - allocated


def _failure(index: int, event: Event, failure: OutOfMemory) -> Failure:
    return Failure(
        index, event, failure.segment_bytes, failure.allocated_bytes, failure.reserved_bytes, failure.free_bytes
    )


def _integers(value: Failure | Outcome) -> dict[str, Any]:
    return {field.name: found for field in fields(value) if type(found := getattr(value, field.name)) is int}
