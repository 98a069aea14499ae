"""A virtual GPU: PyTorch code runs on `device="vgpu"` with no data, and memory and time come out as on a named card.

    import bench.vgpu as vgpu

    with vgpu.virtual_gpu("rtx4090") as device:      # or: device = vgpu.enable("rtx4090") ... vgpu.disable()
        model = Model().to("vgpu")
        ...
        torch.vgpu.max_memory_allocated()

It is a PyTorch backend in pure Python (`backend`) under a dispatch mode (`mode`) that runs operators on fake tensors,
gives every storage to a simulation of CUDA's caching allocator (`memory`, `allocator`), and every operator to a clock
(`clock`, `kernels`). One process simulates one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from bench.targets import TARGETS, Target, find_target
from bench.vgpu import autocast, operators
from bench.vgpu.accelerator import accelerator
from bench.vgpu.allocator_config import AllocatorConfig
from bench.vgpu.assignment import assignable_data
from bench.vgpu.backend import VirtualGpu
from bench.vgpu.device import RELEASE, Device, current, set_current
from bench.vgpu.distributed import alike_on_all_ranks
from bench.vgpu.generator import generators
from bench.vgpu.guard import Guard, engine_errors
from bench.vgpu.memory import CATEGORIES
from bench.vgpu.mode import VirtualMode
from bench.vgpu.patches import patched_torch
from bench.vgpu.recurrent import flattened_weights
from bench.vgpu.resizes import following_resizes
from bench.vgpu.stand_ins import answering

__all__ = [
    "CATEGORIES",
    "TARGETS",
    "Device",
    "Target",
    "current",
    "disable",
    "enable",
    "find_target",
    "virtual_gpu",
]

_setup_privateuseone_for_python_backend("vgpu", VirtualGpu(), device_guard=Guard())
operators.install()
autocast.install()

_open = ExitStack()


def enable(target: Target | str) -> Device:
    """Make `device="vgpu"` simulate `target` until `disable()`; every tensor made meanwhile is fake.

    Raises:
        ValueError: There is no such target.
        RuntimeError: A virtual GPU is enabled already.
    """
    global _open
    stack = ExitStack()
    device = stack.enter_context(virtual_gpu(target))
    _open = stack
    return device


def disable() -> None:
    """End what `enable` began; without it, do nothing."""
    _open.close()


@contextmanager
def virtual_gpu(
    target: Target | str, release: tuple[int, int] = RELEASE, alloc_conf: str | None = None
) -> Iterator[Device]:
    """`enable` and `disable` as a context.

    Args:
        target: The card.
        release: Rules that changed are those of this PyTorch release.
        alloc_conf: Settings of the allocator, as in "expandable_segments:True"; None: those of the environment, as
            torch.cuda has it (PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF).

    Raises:
        ValueError: There is no such target or setting.
        RuntimeError: A virtual GPU is enabled already.
    """
    from bench.vgpu import device as state

    found = find_target(target) if isinstance(target, str) else target
    if state._current is not None:
        raise RuntimeError(f"a virtual {state._current.target.name} is enabled already")
    config = AllocatorConfig.from_environment(os.environ) if alloc_conf is None else AllocatorConfig.parse(alloc_conf)
    device = Device(found, release, config)
    mode = VirtualMode(device)
    set_current(device)
    try:
        with (
            patched_torch(mode.uncharged),
            answering(),
            assignable_data(),
            flattened_weights(),
            generators(),
            alike_on_all_ranks(),
            accelerator(torch.get_device_module("vgpu")),
            autocast.cast_cache(),
            following_resizes(device),
            engine_errors(),
            device.recordings,
            # The backward runs in this thread, so that its frames lead to the line that asked for it.
            torch.autograd.set_multithreading_enabled(False),
            mode,
        ):
            yield device
    finally:
        set_current(None)
