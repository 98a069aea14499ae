"""Storages that are resized, which no operator shows: FSDP frees and refills its unsharded parameters so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.vgpu.allocator import OutOfMemory
from bench.vgpu.device import Device
from bench.vgpu.oom import out_of_memory_error


@contextmanager
def following_resizes(device: Device) -> Iterator[None]:
    """Tell the device's memory of every `UntypedStorage.resize_`; out of memory is what CUDA makes of it."""
    resize = torch.UntypedStorage.resize_
    memory, name = device.memory, "UntypedStorage.resize_"

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        if memory.holds(storage._cdata):
            memory.operator = name
            try:
                memory.resize(storage, device.stream, "parameters")
            except OutOfMemory as failure:
                raise out_of_memory_error(failure, device, name, sys._getframe(1)) from None
        return result

    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
