"""Out of memory, in CUDA's words, with the operator and the line that asked."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING

import torch

from bench.vgpu.allocator import OutOfMemory

if TYPE_CHECKING:
    from bench.vgpu.device import Device

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_size(size_bytes: int) -> str:
    """As c10::CachingAllocator::format_size writes it: two decimals, from GiB down to bytes."""
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} bytes"


def asking_line(frame: FrameType | None) -> str:
    """`path/to/module.py:line in function` of the innermost frame outside torch and this package."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("torch.", "bench.vgpu", "contextlib")):
            path = name.replace(".", "/") + ".py" if name != "__main__" else frame.f_code.co_filename.rpartition("/")[2]
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


class VirtualOutOfMemoryError(torch.OutOfMemoryError):
    """The error that users catch, with what explains it.

    Attributes:
        requested_bytes: What was asked for.
        operator: The operator that asked.
        line: The source line that asked.
    """

    def __init__(self, message: str, requested_bytes: int, operator: str, line: str) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.operator = operator
        self.line = line


def out_of_memory_error(
    failure: OutOfMemory, device: Device, operator: str, frame: FrameType | None
) -> VirtualOutOfMemoryError:
    """CUDA's message (c10/cuda/CUDACachingAllocator.cpp, torch 2.13) for `failure`, and who asked."""
    target = device.target
    in_use = failure.reserved_bytes + (target.outside_bytes or 0)
    line = asking_line(frame)
    allowed = "" if failure.allowed_bytes is None else f"{format_size(failure.allowed_bytes)} allowed; "
    message = (
        f"CUDA out of memory. Tried to allocate {format_size(failure.segment_bytes)}. "
        f"GPU 0 has a total capacity of {format_size(target.memory_bytes)} "
        f"of which {format_size(failure.free_bytes)} is free. "
        f"Including non-PyTorch memory, this process has {format_size(in_use)} memory in use. "
        f"{allowed}Of the allocated memory {format_size(failure.allocated_bytes)} is allocated by PyTorch, and "
        f"{format_size(failure.reserved_bytes - failure.allocated_bytes)} is reserved by PyTorch but unallocated. "
        f"Asked for by {operator} at {line}."
    )
    return VirtualOutOfMemoryError(message, failure.requested_bytes, operator, line)
