"""Counters of the caching allocator, as `torch.cuda.memory_stats()` names them.

A pool and the allocator as a whole have one `Counters` each; every change is made to both. What a counter counts is the
comment of its field in `DeviceStats`, c10/core/CachingDeviceAllocator.h, torch 2.13.
"""

from __future__ import annotations


class Gauge:
    """One `Stat` of torch: a current value, its peak, and what was added and taken since the last reset.

    Attributes:
        current: Value now.
        peak: Highest value since `reset_peak`.
        allocated: Sum of all increases since `reset_accumulated`.
    """

    __slots__ = ("_base", "allocated", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self._base = 0

    def increase(self, amount: int) -> None:
        """Add, and follow the peak."""
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def decrease(self, amount: int) -> None:
        """Take away; `freed` follows from the other values."""
        self.current -= amount

    @property
    def freed(self) -> int:
        """Sum of all decreases since `reset_accumulated`."""
        return self._base + self.allocated - self.current

    def reset_peak(self) -> None:
        """Make the current value the peak."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Start `allocated` and `freed` at zero."""
        self._base = self.current
        self.allocated = 0


class Counters:
    """The counters of one pool, or of all.

    `active` is `allocation` plus the blocks that wait for another stream, so it is not counted but derived: its peak is
    the peak of `allocation`, or what was seen while some block waited.
    """

    __slots__ = (
        "_active_base",
        "_active_bytes_base",
        "_active_bytes_seen",
        "_active_seen",
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self) -> None:
        self.allocation = Gauge()
        self.allocated_bytes = Gauge()
        self.requested_bytes = Gauge()
        self.inactive_split = Gauge()
        self.inactive_split_bytes = Gauge()
        self.segment = Gauge()
        self.reserved_bytes = Gauge()
        self.waiting = self.waiting_bytes = 0
        self._active_seen = self._active_bytes_seen = 0
        self._active_base = self._active_bytes_base = 0

    def take(self, size_bytes: int, requested_bytes: int, split: int, split_bytes: int) -> None:
        """Count an allocation, and the change it makes to the inactive split blocks.

        Gauges are changed in place here and in `give_back`: these two run at every event.
        """
        gauge = self.allocation
        gauge.allocated += 1
        gauge.current = now = gauge.current + 1
        if now > gauge.peak:
            gauge.peak = now
        gauge = self.allocated_bytes
        gauge.allocated += size_bytes
        gauge.current = now = gauge.current + size_bytes
        if now > gauge.peak:
            gauge.peak = now
        gauge = self.requested_bytes
        gauge.allocated += requested_bytes
        gauge.current = now = gauge.current + requested_bytes
        if now > gauge.peak:
            gauge.peak = now
        if self.waiting:
            self._see_active()
        if split_bytes:
            self._split(split, split_bytes)

    def give_back(self, size_bytes: int, requested_bytes: int, split: int, split_bytes: int) -> None:
        """Count a free that was done at once."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size_bytes
        self.requested_bytes.current -= requested_bytes
        if split_bytes:
            self._split(split, split_bytes)

    def wait(self, size_bytes: int) -> None:
        """Count a free that has to wait for another stream: no longer allocated, still active."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size_bytes
        self.waiting += 1
        self.waiting_bytes += size_bytes

    def wait_over(self, size_bytes: int, requested_bytes: int, split: int, split_bytes: int) -> None:
        """Count the end of such a wait."""
        self.waiting -= 1
        self.waiting_bytes -= size_bytes
        self.requested_bytes.current -= requested_bytes
        if split_bytes:
            self._split(split, split_bytes)

    def _split(self, split: int, split_bytes: int) -> None:
        gauge = self.inactive_split_bytes
        gauge.current = now = gauge.current + split_bytes
        if split_bytes > 0:
            gauge.allocated += split_bytes
            if now > gauge.peak:
                gauge.peak = now
        if split:
            gauge = self.inactive_split
            gauge.current = now = gauge.current + split
            if split > 0:
                gauge.allocated += split
                if now > gauge.peak:
                    gauge.peak = now

    def _see_active(self) -> None:
        self._active_seen = max(self._active_seen, self.allocation.current + self.waiting)
        self._active_bytes_seen = max(self._active_bytes_seen, self.allocated_bytes.current + self.waiting_bytes)

    def _gauges(self) -> tuple[tuple[str, Gauge], ...]:
        return (
            ("allocation", self.allocation),
            ("allocated_bytes", self.allocated_bytes),
            ("requested_bytes", self.requested_bytes),
            ("inactive_split", self.inactive_split),
            ("inactive_split_bytes", self.inactive_split_bytes),
            ("segment", self.segment),
            ("reserved_bytes", self.reserved_bytes),
        )

    def reset_peaks(self) -> None:
        """Make all current values the peaks."""
        for _, gauge in self._gauges():
            gauge.reset_peak()
        self._active_seen = self._active_bytes_seen = 0
        self._see_active()

    def reset_accumulated(self) -> None:
        """Start all sums at zero."""
        for _, gauge in self._gauges():
            gauge.reset_accumulated()
        self._active_base = self.allocation.current + self.waiting
        self._active_bytes_base = self.allocated_bytes.current + self.waiting_bytes

    def report(self, group: str) -> dict[str, int]:
        """All values as `stat.group.metric`; `group` is "all", "small_pool" or "large_pool"."""
        values: dict[str, int] = {}
        for name, gauge in self._gauges():
            values.update(gauge_report(f"{name}.{group}", gauge))
        count, size = self.allocation, self.allocated_bytes
        for name, gauge, waiting, seen, base in (
            ("active", count, self.waiting, self._active_seen, self._active_base),
            ("active_bytes", size, self.waiting_bytes, self._active_bytes_seen, self._active_bytes_base),
        ):
            current = gauge.current + waiting
            values[f"{name}.{group}.current"] = current
            values[f"{name}.{group}.peak"] = max(gauge.peak, seen)
            values[f"{name}.{group}.allocated"] = gauge.allocated
            values[f"{name}.{group}.freed"] = base + gauge.allocated - current
        return values


def gauge_report(name: str, gauge: Gauge) -> dict[str, int]:
    """The four metrics of one gauge, under `name`."""
    return {
        f"{name}.current": gauge.current,
        f"{name}.peak": gauge.peak,
        f"{name}.allocated": gauge.allocated,
        f"{name}.freed": gauge.freed,
    }
