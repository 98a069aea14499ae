"""Time on the virtual GPU: a clock for the host and one for each stream.

The host launches an operator and goes on; the operator starts when its stream is free. Whatever the device waits for is
charged to what it waited for, so that the sum of a step's charges is the step's time on the default stream.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum


class Bound(StrEnum):
    """What a stretch of time was spent on."""

    HOST = "host"
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    TRANSFER = "transfer"
    COLLECTIVE = "collective"


@dataclass
class Stamp:
    """A point on a stream's clock, in seconds, and what the stream was busy with before it."""

    at_s: float
    bound: Bound


@dataclass
class _Lane:
    """One stream: free from `free_s` on, last busy with `bound`."""

    free_s: float = 0.0
    bound: Bound = Bound.HOST


@dataclass
class Clock:
    """The clocks of one device, all starting at zero.

    Attributes:
        host_s: The host's clock.
        spent_s: Seconds on the default stream by what they were spent on.
    """

    host_s: float = 0.0
    spent_s: defaultdict[Bound, float] = field(default_factory=lambda: defaultdict(float))
    _lanes: defaultdict[int, _Lane] = field(default_factory=lambda: defaultdict(_Lane))

    def launch(self, stream: int, kernel_s: float, bound: Bound, launch_s: float) -> None:
        """Spend `launch_s` on the host, then run a kernel of `kernel_s` on `stream` once that is free."""
        self.host_s += launch_s
        lane = self._lanes[stream]
        start_s = max(self.host_s, lane.free_s)
        if stream == 0:
            self.spent_s[Bound.HOST] += start_s - lane.free_s
            self.spent_s[bound] += kernel_s
        lane.free_s = start_s + kernel_s
        lane.bound = bound

    def host_work(self, seconds: float) -> None:
        """Spend time on the host alone."""
        self.host_s += seconds

    def stamp(self, stream: int) -> Stamp:
        """Where `stream` stands: when all that it was given is done, and not before the host asked."""
        lane = self._lanes[stream]
        return Stamp(max(lane.free_s, self.host_s), lane.bound)

    def wait(self, stream: int, stamp: Stamp) -> None:
        """Make `stream` wait on the device until `stamp`."""
        lane = self._lanes[stream]
        if stamp.at_s <= lane.free_s:
            return
        if stream == 0:
            self.spent_s[stamp.bound] += stamp.at_s - lane.free_s
        lane.free_s = stamp.at_s
        lane.bound = stamp.bound

    def synchronize(self, stream: int | None = None) -> None:
        """Make the host wait for one stream, or for all."""
        lanes = self._lanes.values() if stream is None else [self._lanes[stream]]
        self.host_s = max([self.host_s, *(lane.free_s for lane in lanes)])

    def done(self, stamp: Stamp) -> bool:
        """Whether the host's clock has passed `stamp`."""
        return stamp.at_s <= self.host_s
