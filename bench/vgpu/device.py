"""The state of one simulated card: its memory, its clocks, its streams, and what it had to make up."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

from bench.targets import Target
from bench.vgpu.allocator_config import AllocatorConfig
from bench.vgpu.clock import Clock, Stamp
from bench.vgpu.memory import Memory

if TYPE_CHECKING:
    from bench.vgpu.attribution import Attribution
    from bench.vgpu.history import History

RELEASE = (2, 13)
"""The PyTorch release whose rules hold unless an older one is asked for."""


class Pending:
    """A point in a stream's work; the allocator asks it whether a block may be reused."""

    def __init__(self, clock: Clock, stamp: Stamp) -> None:
        self._clock = clock
        self._stamp = stamp

    def query(self) -> bool:
        """Whether the work before the point is done."""
        return self._clock.done(self._stamp)


class Device:
    """One virtual card.

    Attributes:
        target: What it simulates.
        release: PyTorch release whose rules it follows where they changed.
        clock: Host and stream clocks.
        memory: Storages, workspaces and the allocator behind them.
        stream: Id of the current stream; 0 is the default one.
        adds_in_place: Whether out-of-place sums are what CUDA computes in place: see `attention`.
        stand_ins: Answers that only data could have given, by operator; each was made up.
        unpriced: Operators that take memory which no rule here tells, by name.
        attribution: Notes which module and line made every allocation; None: nobody asked.
        history: Records what the allocator does; None: nobody asked.
        recordings: Ends what `history` began, at the latest with the device.
    """

    def __init__(
        self, target: Target, release: tuple[int, int] = RELEASE, config: AllocatorConfig | None = None
    ) -> None:
        self.target = target
        self.release = release
        self.clock = Clock()
        self.memory = Memory(target, self._pending, config or AllocatorConfig())
        self.stream = 0
        self.adds_in_place = False
        self.stand_ins: Counter[str] = Counter()
        self.unpriced: Counter[str] = Counter()
        self.attribution: Attribution | None = None
        self.history: History | None = None
        self.recordings = ExitStack()
        self._streams = 0

    def _pending(self, stream: int) -> Pending:
        return Pending(self.clock, self.clock.stamp(stream))

    def new_stream(self) -> int:
        """Id of a stream from the pool, which hands out 32 in turn (c10/cuda/CUDAStream.cpp, kStreamsPerPool)."""
        self._streams += 1
        return (self._streams - 1) % 32 + 1


_current: Device | None = None


def current() -> Device:
    """The enabled device.

    Raises:
        RuntimeError: None is enabled.
    """
    if _current is None:
        raise RuntimeError("no virtual GPU is enabled: call bench.vgpu.enable(target) first")
    return _current


def set_current(device: Device | None) -> None:
    """Make `device` the enabled one, or none."""
    global _current
    _current = device
