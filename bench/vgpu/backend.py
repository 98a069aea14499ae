"""The device module: what `torch.get_device_module("vgpu")` returns, with the functions of `torch.cuda`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from bench.vgpu import streams
from bench.vgpu.device import current
from bench.vgpu.memory_functions import MemoryFunctions


class VirtualGpu:
    """Module functions as torch.cuda has them; every figure is that of the enabled virtual card."""

    Stream = streams.Stream
    Event = streams.Event
    OutOfMemoryError = torch.OutOfMemoryError
    memory = MemoryFunctions()
    _seed = 0

    def is_available(self) -> bool:
        """True: the virtual card is there once the package is imported."""
        return True

    def is_initialized(self) -> bool:
        """True: there is nothing to initialise."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def init(self) -> None:
        """Do nothing, as there is nothing to initialise."""

    def device_count(self) -> int:
        """Cards of one node."""
        return current().target.group.cards

    def current_device(self) -> int:
        """Index of the current card: 0, as this process sees one rank."""
        return 0

    def set_device(self, device: Any) -> None:
        """Accept any index of the node; one process simulates one card."""

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Context in which `device` is current."""
        yield

    def get_device_name(self, device: Any = None) -> str:
        """The card's name, as CUDA shows it."""
        return current().target.title

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """CUDA compute capability."""
        return current().target.capability

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Name, compute capability, total memory in bytes, number of multiprocessors."""
        target = current().target
        return SimpleNamespace(
            name=target.title,
            major=target.capability[0],
            minor=target.capability[1],
            total_memory=target.memory_bytes,
            multi_processor_count=target.multiprocessors,
        )

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Whether the card has bfloat16 arithmetic, or emulates it."""
        return including_emulation or "bf16" in current().target.flops_s

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Types that autocast takes."""
        return [torch.float16, torch.bfloat16, torch.float32]

    def current_stream(self, device: Any = None) -> streams.Stream:
        """The stream that work goes to."""
        return streams.Stream(stream_id=current().stream)

    def default_stream(self, device: Any = None) -> streams.Stream:
        """Stream 0."""
        return streams.Stream(stream_id=0)

    @contextmanager
    def stream(self, stream: streams.Stream | None) -> Iterator[None]:
        """Context in which work goes to `stream`; None changes nothing."""
        if stream is None:
            yield
        else:
            with stream:
                yield

    def set_stream(self, stream: streams.Stream) -> None:
        """Send later work to `stream`."""
        current().stream = stream.stream_id

    def synchronize(self, device: Any = None) -> None:
        """Make the host wait for all streams."""
        current().clock.synchronize()

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of the blocks that tensors occupy."""
        return current().memory.allocator.allocated_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        """Highest `memory_allocated` since the last reset."""
        return current().memory.allocator.peak_allocated_bytes

    def memory_reserved(self, device: Any = None) -> int:
        """Bytes that the allocator holds of the card."""
        return current().memory.allocator.reserved_bytes

    def max_memory_reserved(self, device: Any = None) -> int:
        """Highest `memory_reserved` since the last reset."""
        return current().memory.allocator.peak_reserved_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start new peaks from what is held now."""
        current().memory.reset_peak()

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """Set the counters of what was ever allocated and freed to zero."""
        current().memory.allocator.reset_accumulated_stats()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """All counters, keyed as torch.cuda.memory_stats."""
        return current().memory.allocator.stats()

    def memory_snapshot(self, mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        """Segments and blocks, shaped as torch.cuda.memory_snapshot; nothing is traced."""
        return current().memory.allocator.snapshot()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes of the card, as cudaMemGetInfo gives them."""
        target = current().target
        return target.capacity_bytes - self.memory_reserved(), target.memory_bytes

    def empty_cache(self) -> None:
        """Give unused segments back to the card."""
        current().memory.allocator.empty_cache()

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """Reserve no more than this share of the card."""
        current().memory.allocator.set_memory_fraction(fraction)

    def manual_seed(self, seed: int) -> None:
        """Keep the seed; there are no data to draw."""
        self._seed = int(seed)

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Keep a seed that nobody chose."""
        self.manual_seed(secrets.randbits(63))

    seed_all = seed

    def initial_seed(self) -> int:
        """The last seed given."""
        return self._seed

    def get_rng_state(self, device: Any = "vgpu") -> torch.Tensor:
        """Seed and offset, 16 bytes on the CPU, as CUDA keeps them."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "vgpu") -> None:
        """Accept a state; there are no data to draw."""
