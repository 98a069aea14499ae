"""`torch.accelerator` on the virtual GPU: what torch asks a C++ allocator for, the device module answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAMES = {
    "empty_cache": "empty_cache",
    "get_memory_info": "mem_get_info",
    "max_memory_allocated": "max_memory_allocated",
    "max_memory_reserved": "max_memory_reserved",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "memory_stats": "memory_stats",
    "reset_accumulated_memory_stats": "reset_accumulated_memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "current_stream": "current_stream",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
}


@contextmanager
def accelerator(module: Any) -> Iterator[None]:
    """Let functions of `torch.accelerator` be those of the device module."""
    kept = {name: getattr(torch.accelerator, name) for name in _NAMES}
    for name, own in _NAMES.items():
        setattr(torch.accelerator, name, getattr(module, own))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.accelerator, name, function)
