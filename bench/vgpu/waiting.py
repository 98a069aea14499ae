"""Freed blocks that other streams than their own may still use.

Rules from c10/cuda/CUDACachingAllocator.cpp, torch 2.13: each function names the one that it follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from bench.vgpu.segments import WAITING, Block


class Pending(Protocol):
    """A point in a stream's work, such as an event. If it has `synchronize()`, that is called to wait for it."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class _Passed:
    def query(self) -> bool:
        return True


def passed_at_once(_stream: int) -> Pending:
    """A point that its stream has already passed."""
    return _Passed()


class WaitingBlocks:
    """The blocks, each with a point in every stream that used it, first come first served by stream.

    Attributes:
        queues: Points and blocks by stream; a stream without any is not there.
    """

    def __init__(self, record_event: Callable[[int], Pending]) -> None:
        self.queues: dict[int, deque[tuple[Pending, Block]]] = {}
        self._record_event = record_event

    def add(self, block: Block) -> None:
        """Note where the streams stand that used a block being freed (insert_events)."""
        assert block.used_by
        block.state = WAITING
        block.events = len(block.used_by)
        for stream in sorted(block.used_by):
            self.queues.setdefault(stream, deque()).append((self._record_event(stream), block))
        block.used_by = None

    def passed(self) -> Iterator[Block]:
        """Blocks that all streams have passed; a point not passed holds up those behind it (process_events)."""
        for stream, queue in list(self.queues.items()):
            while queue and queue[0][0].query():
                block = queue.popleft()[1]
                block.events -= 1
                if block.events == 0:
                    yield block
            if not queue:
                del self.queues[stream]

    def synchronize(self) -> Iterator[Block]:
        """All blocks, once the host has waited for the streams (synchronize_and_free_events)."""
        for queue in self.queues.values():
            for event, block in queue:
                wait = getattr(event, "synchronize", None)
                if wait is not None:
                    wait()
                block.events -= 1
                if block.events == 0:
                    yield block
        self.queues.clear()
