"""What the allocator did, and a snapshot of it in the shape of `torch.cuda.memory._snapshot()`.

Keys, actions and the order of events follow torch/csrc/cuda/Module.cpp and c10/cuda/CUDACachingAllocator.cpp, torch
2.13 (`memorySnapshot`, `record_trace`). On top of those, allocations and blocks have `category`, `module`, `operator`
and `line` as `attribution` tells them, and the snapshot says which card it is of (`virtual_gpu`). torch's own tools
pass over both.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any

from bench.vgpu.allocator_config import DIVISION_INTERVALS, AllocatorConfig
from bench.vgpu.attribution import line_number
from bench.vgpu.device import Device
from bench.vgpu.memory import Held

Owners = dict[Held, tuple[str, str]]
"""Category and module of what modules and optimizers hold."""

Stack = tuple[tuple[CodeType, int], ...]
"""Code and instruction of each frame, innermost first."""


class Event:
    """One entry of the trace; `held` is the allocation where the device's memory asked for it."""

    __slots__ = ("action", "address", "held", "size_bytes", "stack", "stream", "time_us")

    def __init__(
        self, action: str, address: int, size_bytes: int, stream: int, time_us: int, stack: Stack | None
    ) -> None:
        self.action = action
        self.address = address
        self.size_bytes = size_bytes
        self.stream = stream
        self.time_us = time_us
        self.stack = stack
        self.held: Held | None = None


class History:
    """Records the events of one device's allocator.

    Args:
        device: The device.
        traces: Whether to keep events, and not only the stacks of what lives.
        context: What gets a stack: None, "state" (what lives), "alloc" (allocations too), "all" (frees too).
        max_entries: Events that are kept, the latest.
        skip: Actions that are not recorded.
    """

    def __init__(
        self, device: Device, traces: bool, context: str | None, max_entries: int, skip: Collection[str]
    ) -> None:
        self.events: deque[Event] = deque(maxlen=max_entries)
        self._device = device
        self._traces = traces
        self._context = context
        self._skip = frozenset(skip)
        self._blocks: dict[int, Stack] = {}  # stacks of what lives, by address
        self._segments: dict[int, Stack] = {}
        self._frames: dict[tuple[CodeType, int], dict[str, Any]] = {}

    def __enter__(self) -> History:
        memory = self._device.memory
        memory.allocator.observe(self.record)
        memory.watchers.append(self.note)
        self._device.history = self
        return self

    def __exit__(self, *exc: object) -> None:
        memory = self._device.memory
        memory.allocator.observe(None)
        memory.watchers.remove(self.note)
        self._device.history = None

    def carry_on(self, before: History) -> None:
        """Take over what an earlier recording holds."""
        self.events.extend(before.events)
        self._blocks.update(before._blocks)
        self._segments.update(before._segments)

    def record(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        """Take down one event: the allocator's observer."""
        stack = self._stack(action, address) if self._context else None
        if self._traces and action not in self._skip:
            stack = stack if self._context in ("alloc", "all") else None
            self.events.append(Event(action, address, size_bytes, stream, self._now_us(), stack))

    def note(self, held: Held) -> None:
        """Take down whose allocation the latest event was: a watcher of the device's memory."""
        if self.events and self.events[-1].action == "alloc":
            self.events[-1].held = held

    def snapshot(self) -> dict[str, Any]:
        """The trace, and the segments as they are now; taking it is an event of the next snapshot's trace."""
        allocator = self._device.memory.allocator
        attribution = self._device.attribution
        owners = attribution.owners() if attribution is not None else {}
        entries = [self._entry(event, owners) for event in self.events]
        segments = allocator.snapshot()
        living = {held.block.address: held for held in self._device.memory.now()}
        for segment in segments:
            segment["frames"] = self._resolved(self._segments.get(segment["address"], ()))
            for block in segment["blocks"]:
                block["frames"] = self._resolved(self._blocks.get(block["address"], ()))
                if block["address"] in living:
                    block.update(self._facts(living[block["address"]], owners))
        self.record("snapshot", 0, sum(segment["active_size"] for segment in segments), 0)
        return {
            "segments": segments,
            "device_traces": [entries],
            "allocator_settings": allocator_settings(allocator.config),
            "external_annotations": [],
            "virtual_gpu": {"target": self._device.target.name, "capacity_bytes": allocator.capacity_bytes},
        }

    def _now_us(self) -> int:
        return round(self._device.clock.host_s * 1e6)

    def _stack(self, action: str, address: int) -> Stack | None:
        """The stack that goes with an event; what lives keeps its own until it is freed."""
        living = self._segments if action.startswith("segment") else self._blocks
        if action in ("alloc", "segment_alloc", "segment_map"):
            stack = living[address] = _stack_here()
            return stack
        kept = living.pop(address, None) if action in ("free_completed", "segment_free") else living.get(address)
        return _stack_here() if self._context == "all" else kept

    def _entry(self, event: Event, owners: Owners) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "action": event.action,
            "device_free" if event.action == "oom" else "addr": event.address,
            "size": event.size_bytes,
            "stream": event.stream,
            "time_us": event.time_us,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
        }
        if event.stack is not None:
            entry["frames"] = self._resolved(event.stack)
        if event.held is not None:
            entry.update(self._facts(event.held, owners))
        return entry

    def _facts(self, held: Held, owners: Owners) -> dict[str, str]:
        """Who made an allocation; nothing where nobody asked for that."""
        if self._device.attribution is None:
            return {}
        made = self._device.attribution.described(held, owners.get(held))
        return {"category": made.category, "module": made.module, "operator": made.operator, "line": made.line}

    def _resolved(self, stack: Stack) -> list[dict[str, Any]]:
        return [self._frame(place) for place in stack]

    def _frame(self, place: tuple[CodeType, int]) -> dict[str, Any]:
        """One frame; equal ones are one object, so that a pickle holds each once."""
        frame = self._frames.get(place)
        if frame is None:
            code, instruction = place
            number = line_number(code, instruction)
            frame = self._frames[place] = {"filename": code.co_filename, "line": number, "name": code.co_name}
        return frame


def allocator_settings(config: AllocatorConfig) -> dict[str, Any]:
    """A configuration as a snapshot tells it."""
    divisions = config.roundup_power2_divisions
    values = divisions if isinstance(divisions, tuple) else (divisions,) * DIVISION_INTERVALS
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.text(),
        "max_split_size": -1 if config.max_split_size_bytes is None else config.max_split_size_bytes,
        "garbage_collection_threshold": config.garbage_collection_threshold or 0.0,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << index): value for index, value in enumerate(values)},
    }


def _stack_here() -> Stack:
    """The frames that led to an event, without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("bench.vgpu"):
        frame = frame.f_back
    places = []
    while frame is not None:
        places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(places)
