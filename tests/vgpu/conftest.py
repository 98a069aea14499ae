"""A virtual RTX 4090 for the tests that use `card`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import bench.vgpu as vgpu


@pytest.fixture
def card() -> Iterator[vgpu.Device]:
    with vgpu.virtual_gpu("rtx4090") as device:
        yield device


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """Bytes that a call adds to what is allocated, at its peak."""

    def measure(call: Callable[[], object]) -> int:
        before = torch.vgpu.memory_allocated()
        torch.vgpu.reset_peak_memory_stats()
        call()
        return torch.vgpu.max_memory_allocated() - before

    return measure
