"""One interface, two devices: the card of this machine, or the virtual GPU.

The measuring loop reads memory and time from `Card.module`, which is `torch.cuda` or its virtual twin. What only one of
them can tell goes through the methods of `Card`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bench.record import Source
from bench.vgpu.targets import Target


class Card:
    """The accelerator of this machine.

    Attributes:
        device: What tensors are put on.
        module: The device module, shaped as torch.cuda.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what tensors are for; a real card does not ask."""

    def mark_all(self, category: str) -> None:
        """Say what all that is allocated now is for."""

    def peak_categories(self) -> dict[str, int]:
        """Bytes at the peak by category; empty where the card cannot tell."""
        return {}

    def live_tensor_bytes(self) -> dict[str, int]:
        """Bytes that live tensors asked for, by category; empty where the card cannot tell."""
        return {}

    def process_bytes(self, reserved_bytes: int) -> int | None:
        """What nvidia-smi shows for this process."""
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(self.module.current_device())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid():
                    return int(process.usedGpuMemory)
        return None

    def spent_s(self) -> dict[str, float]:
        """Seconds of the default stream so far by what they were spent on; empty where the card cannot tell."""
        return {}

    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        return []


class VirtualCard(Card):
    """A card that is not there."""

    def __init__(self, state: Any) -> None:
        super().__init__(torch.device("vgpu", 0))
        self._state = state

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Tell the device's memory."""
        self._state.memory.mark((t.to_local() if isinstance(t, DTensor) else t for t in tensors), category)

    def mark_all(self, category: str) -> None:
        """Tell the device's memory."""
        self._state.memory.mark_all(category)

    def peak_categories(self) -> dict[str, int]:
        """As the device's memory followed them."""
        categories: dict[str, int] = self._state.memory.categories()
        return categories

    def live_tensor_bytes(self) -> dict[str, int]:
        """As the device's memory follows them."""
        categories: dict[str, int] = self._state.memory.live_tensor_bytes()
        return categories

    def process_bytes(self, reserved_bytes: int) -> int | None:
        """Reserved and what the context and libraries take, where a figure for those is published."""
        outside_bytes = self._state.target.outside_bytes
        return None if outside_bytes is None else reserved_bytes + outside_bytes

    def spent_s(self) -> dict[str, float]:
        """As the clock charged them."""
        return {bound.value: seconds for bound, seconds in self._state.clock.spent_s.items()}

    def notes(self) -> list[str]:
        """Answers made up, temporaries without a rule, and figures that nobody published."""
        notes = []
        if made_up := self._state.stand_ins:
            notes.append("stand-in answers: " + _listed(made_up))
        if unpriced := self._state.unpriced:
            notes.append("temporaries without a rule, counted as 0 bytes: " + _listed(unpriced))
        if self._state.target.outside_bytes is None:
            notes.append("no published figure for memory outside the allocator: process memory unknown")
        return notes


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in sorted(counts.items()))


@contextmanager
def open_card(target: Target, source: Source) -> Iterator[Card]:
    """The device of a cell, with a process group for its ranks.

    A predicted group of any size has a fake process group, of which this process is rank 0. A measured cell has one
    rank, as the runner gives it one process.
    """
    if source is Source.PREDICTED:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        import bench.vgpu as vgpu

        with vgpu.virtual_gpu(target) as state:
            dist.init_process_group("fake", rank=0, world_size=target.world_size, store=FakeStore())
            try:
                yield VirtualCard(state)
            finally:
                dist.destroy_process_group()
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    try:
        yield Card(torch.device("cuda", torch.cuda.current_device()))
    finally:
        dist.destroy_process_group()
