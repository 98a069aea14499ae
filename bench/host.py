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


def free_memory_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Free host memory, as the machine and the control group that we run in see it.

    What a group uses (`memory.current`) includes the page cache; its `inactive_file` part is on the list from which the
    kernel reclaims first (Documentation/admin-guide/cgroup-v2.rst, memory.stat), so it counts as free.

    Args:
        group: The folder of the control group, of version 2.
    """
    free_bytes = int(psutil.virtual_memory().available)
    # A container's limit is invisible to psutil. No such files, or the word "max": no limit.
    with suppress(OSError, ValueError):
        limit_bytes = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used_bytes = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        free_bytes = min(free_bytes, limit_bytes - used_bytes)
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


def process_bytes(uuid: str | None = None, title: str | None = None) -> int | None:
    """What nvidia-smi shows for this process on the card with this UUID, or on the first one called `title`.

    None where it shows nothing.
    """
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        if uuid is not None:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        else:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            handle = next(handle for handle in handles if str(pynvml.nvmlDeviceGetName(handle)) == title)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        # In a container these numbers are the host's; then a process that is alone on the card is this one.
        ours = running if len(running) == 1 else [process for process in running if process.pid == os.getpid()]
        used_bytes: int | None = ours[0].usedGpuMemory if ours else None
        return used_bytes
    return None


def missing_card(title: str) -> str | None:
    """Which card is missing in this machine for a measurement on `title`; None where there is one."""
    found = cards()
    if title in found:
        return None
    return f"no {title} in this machine" + (f" (it has {', '.join(found)})" if found else "")


def why_not_measured(title: str) -> str | None:
    """Why PyTorch can measure nothing here on the card called `title`; None where it can."""
    if (missing := missing_card(title)) is not None:
        return missing
    import torch

    if torch.version.cuda is None:
        return "this build of PyTorch has no CUDA"
    # Counted by NVML, as the visible ones: CUDA itself is not started, so this process takes no memory of the card.
    return None if torch.cuda.device_count() else "PyTorch sees no CUDA device"
