"""A workload without a network, and cell functions that end in every way in which a cell can end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from bench.config import Cell
from bench.record import Peak, Record, Status, Timing

PATH = "fake_cells:Fake"


@dataclass(frozen=True)
class FakeSettings:
    batch_size: int = 8
    rate: float = 0.5
    mode: Literal["plain", "fancy"] = "plain"
    widths: tuple[int, ...] = (4, 4)
    name: str | None = None
    # What the cell functions below do: read from the settings, so that it is part of the cell.
    ending: str = "ok"
    folder: str = ""

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError("rate is below zero")


class Fake:
    """The shape of a workload; nothing ever steps it."""

    presets: ClassVar = {"normal": FakeSettings(), "tiny": FakeSettings(batch_size=2)}
    baseline: ClassVar = {"precision": "bf16"}
    unit = "samples"
    networks: ClassVar = {}
    items_per_step = 1

    def __init__(self, settings: FakeSettings) -> None:
        self.settings = settings

    def place(self, device: Any) -> None: ...

    def optimizers(self) -> dict[str, Any]:
        return {}

    def micro_batches(self, count: int) -> Any: ...

    def losses(self, micro_batch: Any) -> Any: ...

    def finish_step(self) -> None: ...


@dataclass(frozen=True)
class NestedSettings:
    batch_size: int = 8
    inner: FakeSettings = FakeSettings()


class NoPresets(Fake):
    presets: ClassVar = {}


class DictPresets(Fake):
    presets: ClassVar = {"only": {"batch_size": 8}}


class NestedPresets(Fake):
    presets: ClassVar = {"only": NestedSettings()}


class Broken:
    """Lacks most of a workload."""

    presets: ClassVar = {}


def run_cell(cell: Cell, trace: Callable[..., None] | None = None) -> Record:
    """End as the cell's settings say, after a file in their folder, if they name one, has told of the start."""
    ending, folder = cell.settings["ending"], cell.settings["folder"]
    if folder:
        Path(folder, f"started-{cell.techniques['batch_size']}-{os.getpid()}").touch()
    if ending == "hang once":
        ending = "ok" if Path(folder, "hung").exists() else "hang"
        Path(folder, "hung").touch()
    if ending in ENDINGS:
        return ENDINGS[ending](cell)
    if ending.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, ending))
    print("noise on stdout")
    if trace is not None:
        trace(0, "encode", 0, 2**20, 2**21)
        trace(0, "decode", 1, 3 * 2**20, 2**22)
    peak = Peak(allocated_bytes=2**30, reserved_bytes=2**31, process_bytes=3 * 2**30, categories={"activations": 2**29})
    timing = Timing(step_s=0.25, bound_s={"compute": 0.25})
    return _record(cell, Status.OK, first=peak, steady=peak, static_bytes=2**28, timing=timing, items_per_step=8)


def _oom(cell: Cell) -> Record:
    return _record(cell, Status.OOM, reason=OOM)


def _refused(cell: Cell) -> Record:
    return _record(cell, Status.REFUSED, reason="Fake cannot take it")


def _raise(cell: Cell) -> Record:
    raise RuntimeError(f"no such\nluck in {Path.cwd()}/here")


def _library(cell: Cell) -> Record:
    return json.loads("{")  # the innermost frame is not ours


def _exit(cell: Cell) -> Record:
    os._exit(3)


def _hang(cell: Cell) -> Record:
    time.sleep(600)
    raise AssertionError("nobody came")


def _unstorable(cell: Cell) -> Record:
    return _record(cell, Status.OK, notes=[object()])


def _child(cell: Cell) -> Record:
    """Leave a process behind."""
    child = subprocess.Popen(["sleep", "600"])
    return _record(cell, Status.OK, notes=[str(child.pid)])


def _threads(cell: Cell) -> Record:
    import torch

    return _record(cell, Status.OK, notes=[str(torch.get_num_threads())])


def _record(cell: Cell, status: Status, **rest: Any) -> Record:
    facts: dict[str, Any] = {"unit": "samples", **rest}
    return Record(key=cell.key, cell=cell.to_dict(), status=status, source=cell.source, **facts)


OOM = "CUDA out of memory. Tried to allocate 944.00 MiB. GPU 0 has 10.88 GiB. [in attention]"
ENDINGS: dict[str, Callable[[Cell], Record]] = {
    "oom": _oom,
    "refused": _refused,
    "raise": _raise,
    "library": _library,
    "exit": _exit,
    "hang": _hang,
    "unstorable": _unstorable,
    "child": _child,
    "threads": _threads,
}
