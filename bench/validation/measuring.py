"""Measurements as the published ones were taken, through the device's own functions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.validation.cards import card

STEADY = 2
"""Repetitions after which the virtual card repeats itself to the byte; the published runs took ten or a hundred."""


def peak_bytes(run: Callable[[], object]) -> int:
    """Highest allocation of one run, once it repeats itself."""
    device = card()
    for _ in range(STEADY):
        run()
    device.reset_peak_memory_stats()
    run()
    return int(device.max_memory_allocated())


def seconds(run: Callable[[], object]) -> float:
    """Device time of one run between two events, after the second-level cache was emptied, as by Triton's `do_bench`.

    That zeroes 256 MB first, which is time for the host to get ahead of the device.
    """
    device = card()
    flush = torch.empty(256_000_000 // 4, dtype=torch.int32, device="vgpu")
    start, end = (device.Event(enable_timing=True) for _ in range(2))
    for _ in range(STEADY):
        run()
    device.synchronize()
    flush.zero_()
    start.record()
    run()
    end.record()
    device.synchronize()
    return float(start.elapsed_time(end)) / 1e3
