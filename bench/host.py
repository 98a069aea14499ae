"""What this machine has: processors, free memory, cards."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

CELL_HOST_BYTES = 3 * 2**29
"""Host memory to keep free for one cell: its own Python and torch, and a predicted step's bookkeeping."""


def worker_count(jobs: int | None = None, limit_bytes: int | None = None) -> int:
    """How many cells run at once: at most `jobs`, one a processor, and as many as fit into free host memory.

    Args:
        jobs: The user's own limit.
        limit_bytes: Host memory that all cells together may count on, if less than what is free.
    """
    free_bytes = min(free_memory_bytes(), limit_bytes) if limit_bytes is not None else free_memory_bytes()
    fitting = max(1, free_bytes // CELL_HOST_BYTES)
    return min(fitting, jobs if jobs is not None else len(os.sched_getaffinity(0)))


def free_memory_bytes() -> int:
    """Free host memory, as the machine and the control group that we run in see it."""
    free_bytes = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    # A container's limit is invisible to psutil. No such files, or the word "max": no limit.
    with suppress(OSError, ValueError):
        limit_bytes = int((group / "memory.max").read_text())
        free_bytes = min(free_bytes, limit_bytes - int((group / "memory.current").read_text()))
    return free_bytes


@cache
def cards() -> dict[str, str]:
    """NVIDIA cards of this machine: name as PyTorch shows it -> driver version."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {str(pynvml.nvmlDeviceGetName(handle)): driver for handle in handles}
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def why_not_measured(title: str) -> str | None:
    """Why nothing can be measured here on the card called `title`; None where it can."""
    found = cards()
    if title not in found:
        return f"no {title} in this machine" + (f" (it has {', '.join(found)})" if found else "")
    import torch

    if torch.version.cuda is None:
        return "this build of PyTorch has no CUDA"
    # Counted by NVML, as the visible ones: CUDA itself is not started, so this process takes no memory of the card.
    return None if torch.cuda.device_count() else "PyTorch sees no CUDA device"
