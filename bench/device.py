"""One interface, two devices: the card of this machine, or the virtual GPU.

The measuring loop reads memory and time from `Card.module`, which is `torch.cuda` or its virtual twin. What only one of
them can tell goes through the methods of `Card`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _random as random_state

from bench import host
from bench.errors import BadInput
from bench.record import Source
from bench.targets import Target
from bench.vgpu.allocator_config import ENVIRONMENT_VARIABLES

if TYPE_CHECKING:
    from bench.vgpu.attribution import Allocation, Attribution


class Card:
    """The accelerator of this machine.

    Attributes:
        device: What tensors are put on.
        module: The device module, shaped as torch.cuda.
        mark: To be told what tensors are for; None where the card does not ask.
    """

    mark: Callable[[Iterable[Tensor], str], None] | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)

    def mark_all(self, category: str) -> None:
        """Say what all that is allocated now is for."""

    def peak_categories(self) -> dict[str, int]:
        """Bytes at the peak by category; empty where the card cannot tell."""
        return {}

    def live_tensor_bytes(self) -> dict[str, int]:
        """Bytes that live tensors asked for, by category; empty where the card cannot tell."""
        return {}

    def name(self, module: nn.Module, name: str) -> None:
        """Say what a network is called; a real card does not ask."""

    def allocations(self, at_failure: bool) -> list[Allocation] | None:
        """What lived at the peak, or when memory ran out; None: the card cannot tell, or was not opened to do so."""
        return None

    def process_bytes(self, reserved_bytes: int) -> int | None:
        """What nvidia-smi shows for this process; None where it does not."""
        # By its UUID: NVML counts the cards of the machine, CUDA those that it may see.
        return host.process_bytes(uuid=f"GPU-{self.module.get_device_properties(self.device).uuid}")

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

    def name(self, module: nn.Module, name: str) -> None:
        """Tell who follows the modules, if somebody does."""
        if self._state.attribution is not None:
            self._state.attribution.name(module, name)

    def allocations(self, at_failure: bool) -> list[Allocation] | None:
        """As they were attributed."""
        attribution: Attribution | None = self._state.attribution
        if attribution is None:
            return None
        return attribution.at_failure() if at_failure else attribution.at_peak()

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
        if ignored := [name for name in ENVIRONMENT_VARIABLES if name in os.environ]:
            notes.append(f"not used, as a cell's numbers hang on its configuration alone: {', '.join(ignored)}")
        return notes


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in sorted(counts.items()))


@contextmanager
def open_card(target: Target, source: Source, explain: bool = False) -> Iterator[Card]:
    """The device of a cell, with a process group for its ranks; with `explain`, a virtual one tells `allocations`.

    A predicted group of any size has a fake process group, of which this process is rank 0. A measured cell has one
    rank, as the runner gives it one process.
    """
    if source is Source.PREDICTED:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        import bench.vgpu as vgpu
        from bench.vgpu.attribution import attributing

        with (
            vgpu.virtual_gpu(target, alloc_conf="") as state,  # the same bytes whatever the environment holds
            attributing(state) if explain else nullcontext(),
            _group("fake", target.world_size, FakeStore()),
        ):
            yield VirtualCard(state)
        return
    device = _find_cuda(target.title)
    with _group("nccl", 1, dist.HashStore()):  # type: ignore[attr-defined]
        yield Card(device)


def _find_cuda(title: str) -> torch.device:
    """The first card called `title`, made the current one: a machine can have cards of several kinds."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if title not in names:
        raise BadInput(f"PyTorch sees no {title}, but {', '.join(names) or 'no card'}")
    index = names.index(title)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def _group(backend: str, world_size: int, store: Any) -> Iterator[None]:
    """A process group of which this process is rank 0."""
    dist.init_process_group(backend, rank=0, world_size=world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        random_state._rng_tracker = None  # made for the device of this group, and used for every later one's
