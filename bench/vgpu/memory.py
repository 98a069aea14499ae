"""Storages of tensors, seen as allocations: what lives, in which category, and what lived at the peak."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.targets import Target
from bench.vgpu.allocator import Block, CachingAllocator, OutOfMemory
from bench.vgpu.allocator_config import AllocatorConfig

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "workspace")

_NEVER = 2**63
_graph_task = torch._C._current_graph_task_id


class Held:
    """One allocation: its block, when it lived (in allocation events), and what it is for.

    `category` is None until known: see `Memory.categories`. `origin` is who made it, where somebody asked for that.
    """

    __slots__ = ("block", "born", "category", "died", "origin", "survived", "task")

    def __init__(self, block: Block, born: int, category: str | None, task: int) -> None:
        self.block = block
        self.born = born
        self.died = _NEVER
        self.category = category
        self.task = task
        self.survived = False
        self.origin: Any = None


class _Watch(weakref.ref[Any]):
    """A weak reference to a storage that knows its key."""

    __slots__ = ("key",)

    key: int


class Memory:
    """The device memory of one process on one card.

    Every storage is an allocation of the caching allocator, from the operator that made it to the moment when its last
    tensor dies. Reserved for the current stream; freed where the storage is freed, as CUDA does.

    Attributes:
        allocator: The simulation of CUDA's allocator.
        operator: What asks for memory now; it stays what it was when nothing asks.
        watchers: Called with every new allocation.
    """

    def __init__(self, target: Target, record_event: Callable[[int], Any], config: AllocatorConfig) -> None:
        self.allocator = CachingAllocator(
            target.capacity_bytes, config=config, record_event=record_event, total_bytes=target.memory_bytes
        )
        self.operator: Any = None
        self.watchers: list[Callable[[Held], None]] = []
        self._live: dict[int, tuple[_Watch, Held | None]] = {}
        self._workspaces: dict[tuple[bool, int], Held] = {}
        self._busy = False
        self._late: deque[Held] = deque()
        self._tasks = 0
        self._last_task = -1
        self._clock = 0
        self._peak_bytes = 0
        self._peak_at = self._failed_at = 0
        self._standing: set[Held] = set()
        self._recent: list[Held] = []

    def holds(self, key: int) -> bool:
        """Whether the storage at `key` (its `_cdata`) is known."""
        return key in self._live

    def take(self, storage: torch.UntypedStorage, stream: int) -> None:
        """Allocate for a storage that an operator has just made.

        Raises:
            OutOfMemory: The card cannot hold it.
        """
        size_bytes = storage.nbytes()
        held = self._allocate(size_bytes, stream, None) if size_bytes else None
        watch = _Watch(storage, self._dropped)
        watch.key = storage._cdata
        self._live[watch.key] = (watch, held)

    def resize(self, storage: torch.UntypedStorage, stream: int, category: str | None = None) -> None:
        """Follow a storage whose size was set: a new block, a copy, then the old block is freed.

        aten/src/ATen/native/cuda/Resize.cpp, resize_bytes_cuda (torch 2.13).
        """
        watch, old = self._live[storage._cdata]
        size_bytes = storage.nbytes()
        if size_bytes == (old.block.requested_bytes if old is not None else 0):
            return
        new = self._allocate(size_bytes, stream, category) if size_bytes else None
        self._live[watch.key] = (watch, new)
        if old is not None:
            self._free(old)

    def workspace(self, size_bytes: int, stream: int) -> None:
        """Make sure that this thread's cuBLAS handle has its workspace on `stream`; it is never given back.

        The autograd engine runs backward in a thread of its own, with a handle of its own
        (aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.13).
        """
        slot = (_graph_task() != -1, stream)
        if slot not in self._workspaces:
            self._workspaces[slot] = self._allocate(size_bytes, stream, "workspace")

    def pass_through(self, sizes_bytes: Iterable[int], stream: int) -> None:
        """Allocate temporaries of one operator together, then free them."""
        for held in [self._allocate(size, stream, "temporaries") for size in sizes_bytes if size]:
            self._free(held)

    def record_stream(self, storage: torch.UntypedStorage, stream: int) -> None:
        """Keep the storage's block from reuse until `stream` has passed the point where it is freed."""
        held = self._live[storage._cdata][1]
        if held is not None:
            self.allocator.record_stream(held.block, stream)

    def _allocate(self, size_bytes: int, stream: int, category: str | None) -> Held:
        self._busy = True
        try:
            block = self.allocator.allocate(size_bytes, stream)
        except OutOfMemory:
            self._failed_at = self._clock
            raise
        finally:
            self._busy = False
        task = _graph_task()
        if task != self._last_task:
            self._last_task = task
            self._tasks += task != -1
        if category is None and not torch.is_grad_enabled():
            category = "temporaries"
        self._clock += 1
        held = Held(block, self._clock, category, self._tasks)
        self._recent.append(held)
        for watch in self.watchers:
            watch(held)
        if self.allocator.allocated_bytes > self._peak_bytes:
            self._peak_bytes = self.allocator.allocated_bytes
            self._peak_at = self._clock
        if self._late:
            self._free_late()
        return held

    def _dropped(self, watch: _Watch) -> None:
        held = self._live.pop(watch.key)[1]
        if held is None:
            return
        if self._busy:  # garbage collection struck inside the allocator
            self._late.append(held)
        else:
            self._free(held)

    def _free_late(self) -> None:
        while self._late:
            self._free(self._late.popleft())

    def _free(self, held: Held) -> None:
        self._busy = True
        try:
            self.allocator.free(held.block)
        finally:
            self._busy = False
        self._clock += 1
        held.died = self._clock
        if held.category is None:
            held.survived = held.task != self._tasks or _graph_task() != -1

    def reset_peak(self) -> None:
        """Forget peaks, and start to follow what lives from here on."""
        self.allocator.reset_peak_stats()
        self._standing = {held for held in (*self._standing, *self._recent) if held.died == _NEVER}
        self._recent = []
        self._peak_bytes = self.allocator.allocated_bytes
        self._peak_at = self._clock

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what these tensors are for; tensors of other devices are passed over."""
        for tensor in tensors:
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry[1] is not None:
                entry[1].category = category

    def mark_all(self, category: str) -> None:
        """Say what every storage without a category is for."""
        for _, held in self._live.values():
            if held is not None and held.category in (None, "temporaries"):
                held.category = category

    def at_peak(self) -> Iterator[Held]:
        """What lived when `allocated_bytes` was highest since `reset_peak`."""
        return self._living(self._peak_at)

    def at_failure(self) -> Iterator[Held]:
        """What lived when the card last had no memory for a request; `reset_peak` forgets what died before."""
        return self._living(self._failed_at)

    def now(self) -> Iterator[Held]:
        """What lives now."""
        return self._living(self._clock)

    def held(self, tensor: Tensor) -> Held | None:
        """The allocation that a tensor lies in; None: it is empty, or lies elsewhere."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry is not None else None

    def _living(self, at: int) -> Iterator[Held]:
        for held in (*self._standing, *self._recent):
            if held.born <= at < held.died:
                yield held

    def categories(self) -> dict[str, int]:
        """Bytes at the peak by category, which add up to the peak.

        Marked tensors are what they were marked. Of the rest, what was made with gradients enabled and lived on into a
        backward is an activation (kept for it, or recomputed in it); what did not is a temporary.
        """
        return self._sums(self.at_peak())

    def live_tensor_bytes(self) -> dict[str, int]:
        """Bytes that tensors held now asked for, by category: less than their blocks by what rounding adds."""
        sums: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
        for held in (*self._standing, *self._recent):
            if held.died == _NEVER:
                sums[self.category_of(held)] += held.block.requested_bytes
        return dict(sums)

    def _sums(self, holds: Iterable[Held]) -> dict[str, int]:
        sums: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
        for held in holds:
            sums[self.category_of(held)] += held.block.size_bytes
        return dict(sums)

    @staticmethod
    def category_of(held: Held) -> str:
        """What an allocation is for, as `categories` tells it."""
        kept = "activations" if held.survived or held.died == _NEVER else "temporaries"
        return held.category or kept
