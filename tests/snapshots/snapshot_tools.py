"""What the tests of snapshots share: an allocator that records, and workloads small enough for a test."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bench.snapshot import Snapshot, snapshot_of
from bench.vgpu.allocator import AllocatorConfig, CachingAllocator
from bench.vgpu.history import History

MIB = 2**20


class Answer(NamedTuple):
    """What a command did: exit status, lines on stdout, lines on stderr."""

    status: int
    out: list[str]
    err: list[str]


class Recording:
    """A caching allocator of its own, and the history of it."""

    def __init__(self, capacity_bytes: int = 2**40, config: AllocatorConfig = AllocatorConfig(), **rest: Any) -> None:  # noqa: B008 - frozen
        self.allocator = CachingAllocator(capacity_bytes, config=config, **rest)
        memory = SimpleNamespace(allocator=self.allocator, watchers=[], now=list)
        self.device: Any = SimpleNamespace(
            clock=SimpleNamespace(host_s=0.0),
            memory=memory,
            attribution=None,
            history=None,
            target=SimpleNamespace(name="test"),
        )
        self.history = History(self.device, True, None, 10**6, ())

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.history:
            yield

    def content(self, knows_capacity: bool = True) -> dict[str, Any]:
        """What a snapshot file would hold now."""
        content = self.history.snapshot()
        if not knows_capacity:
            del content["virtual_gpu"]
        return content

    def snapshot(self, knows_capacity: bool = True) -> Snapshot:
        return snapshot_of("recording", self.content(knows_capacity))


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def block(address: int, size: int, requested: int, frames: Sequence[Any] = (), **facts: str) -> dict[str, Any]:
    state = "active_allocated" if requested else "inactive"
    entry = {"address": address, "size": size, "requested_size": requested, "state": state, "frames": list(frames)}
    return entry | facts


def segment(address: int, *blocks: dict[str, Any]) -> dict[str, Any]:
    total = sum(each["size"] for each in blocks)
    return {
        "device": 0,
        "address": address,
        "total_size": total,
        "stream": 0,
        "segment_type": "small" if total <= 2 * MIB else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
    }


def event(action: str, address: int, size: int, frames: Sequence[Any] = (), stream: int = 0) -> dict[str, Any]:
    key = "device_free" if action == "oom" else "addr"
    return {"action": action, key: address, "size": size, "stream": stream, "time_us": 0, "frames": list(frames)}


def write(path: Path, content: Any) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@dataclass(frozen=True)
class SmallSettings:
    batch_size: int = 64
    width: int = 256


class Small:
    """A training step of a few MiB."""

    presets: ClassVar = {"small": SmallSettings(), "huge": SmallSettings(batch_size=2**27)}
    baseline: ClassVar = {}
    unit = "samples"

    def __init__(self, settings: SmallSettings) -> None:
        self.settings = settings
        self.networks = {"net": Net(settings.width)}

    def place(self, device: torch.device) -> None:
        self.device = device
        self.networks["net"].to(device)

    def optimizers(self) -> dict[str, Any]:
        return {"net": torch.optim.Adam(self.networks["net"].parameters())}

    def micro_batches(self, count: int) -> Any:
        for _ in range(count):
            yield torch.randn(self.settings.batch_size // count, self.settings.width, device=self.device)

    def losses(self, micro_batch: Any) -> Any:
        yield self.networks["net"](micro_batch).mean()

    def finish_step(self) -> None: ...

    @property
    def items_per_step(self) -> int:
        return self.settings.batch_size
