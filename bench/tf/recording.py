"""Profiles of the parts of a run, one after the other, and the allocations in them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.bfc import Event
from bench.tf.allocations import BrokenTrace, read_trace


class Recording:
    """What TensorFlow's profiler saw, in one folder a part, which TensorBoard shows as one run each.

    Args:
        folder: Where to keep the profiles; None: nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self._folder = Path(self._temporary.name) if self._temporary is not None else folder
        self._parts: list[Path] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record what happens inside."""
        import tensorflow as tf

        assert self._folder is not None
        place = self._folder / name
        self._parts.append(place)
        tf.profiler.experimental.start(str(place))
        try:
            yield
        finally:
            tf.profiler.experimental.stop()

    def events(self) -> Iterator[list[Event]]:
        """After each part, all allocations and deallocations so far.

        Raises:
            BrokenTrace: Something was allocated or freed between two parts.
        """
        events: list[Event] = []
        in_use_bytes: int | None = None
        for place in self._parts:
            trace = read_trace(_latest(place))
            before_bytes = trace.events[0].bytes_before
            if in_use_bytes is None:
                events += trace.replayable()
            elif before_bytes == in_use_bytes:
                events += trace.replayable()[len(trace.held) :]  # what was held before is known already
            else:
                raise BrokenTrace(f"{place.name} began with {before_bytes} bytes in use, not {in_use_bytes}")
            in_use_bytes = trace.events[-1].bytes_allocated
            yield list(events)

    def close(self) -> None:
        """Throw away what nobody asked to keep."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _latest(place: Path) -> Path:
    """The newest trace below a folder, which can hold those of earlier runs."""
    found = sorted(place.rglob("*.xplane.pb"))
    if not found:
        raise BrokenTrace(f"TensorFlow's profiler wrote nothing into {place}")
    return found[-1]
