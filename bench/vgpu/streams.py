"""`Stream` and `Event` of the virtual GPU, shaped like torch.cuda's."""

from __future__ import annotations

from typing import Any

import torch

from bench.vgpu.clock import Stamp
from bench.vgpu.device import current


class Stream(torch.Stream):
    """A queue of work with a clock of its own. `Stream()` takes one from the pool; `stream_id=0` is the default one."""

    def __new__(cls, device: Any = None, priority: int = 0, stream_id: int | None = None) -> Stream:
        """A stream of the pool, or the one of this id."""
        if stream_id is None:
            stream_id = current().new_stream()
        index = torch.device(device).index if isinstance(device, str | torch.device) else device
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]
        made = super().__new__(cls, stream_id=stream_id, device_index=index or 0, device_type=kind)
        made._outer = []
        return made

    _outer: list[int]

    def __enter__(self) -> Stream:
        self._outer.append(current().stream)
        current().stream = self.stream_id
        return self

    def __exit__(self, *exc: object) -> None:
        current().stream = self._outer.pop()

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        """Hold later work of this stream until `event` has happened."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Hold later work of this stream until all work given to `stream` so far is done."""
        clock = current().clock
        clock.wait(self.stream_id, clock.stamp(stream.stream_id))

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Mark this point of the stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for the stream."""
        current().clock.synchronize(self.stream_id)

    def query(self) -> bool:
        """Whether the stream has nothing left to do."""
        clock = current().clock
        return clock.done(clock.stamp(self.stream_id))


class Event:
    """A point in a stream's work."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._timing = enable_timing
        self._stamp: Stamp | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark where `stream` (the current one by default) stands."""
        device = current()
        self._stamp = device.clock.stamp(device.stream if stream is None else stream.stream_id)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Hold later work of `stream` until the event has happened; an event never recorded holds nothing."""
        if self._stamp is not None:
            device = current()
            device.clock.wait(device.stream if stream is None else stream.stream_id, self._stamp)

    def query(self) -> bool:
        """Whether the event has happened."""
        return self._stamp is None or current().clock.done(self._stamp)

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        if self._stamp is not None:
            clock = current().clock
            clock.host_s = max(clock.host_s, self._stamp.at_s)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`, as torch.cuda gives them.

        Raises:
            RuntimeError: One of them was made without `enable_timing=True` or never recorded.
        """
        if not (self._timing and end_event._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._stamp is None or end_event._stamp is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._stamp.at_s - self._stamp.at_s) * 1e3
