"""The typed schema of a cell: everything that decides its numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import Source


@dataclass(frozen=True)
class Steps:
    """How many steps the passes of a cell take.

    Attributes:
        memory: Steps of the memory pass; the first is reported apart, the last is the steady state.
        warmup: Untimed steps before the timing pass.
        timed: Timed steps, whose median is reported.
    """

    memory: int = 2
    warmup: int = 0
    timed: int = 1


@dataclass(frozen=True)
class Cell:
    """One unit of work, fully resolved: nothing is left to a default that could change.

    Attributes:
        workload: Import path, "package.module:Class".
        preset: Name of the preset that `settings` started from.
        settings: Every field of the workload's settings, techniques not yet applied.
        techniques: Every technique's value, the workload's baseline filled in.
        target: Name in the target table.
        source: Measure on the card, predict on the virtual GPU, or emulate with TensorFlow's allocator.
        steps: Steps of the passes.
        framework: What the workload is written in.
    """

    workload: str
    preset: str
    settings: dict[str, Any]
    techniques: dict[str, Any]
    target: str
    source: Source = Source.PREDICTED
    steps: Steps = Steps()
    framework: str = "torch"

    @property
    def key(self) -> str:
        """16 hex digits that name the resolved configuration; the version of the code is not part of it."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Job:
    """A cell and what its execution needs beside it; none of this changes a number.

    Attributes:
        cell: What to run.
        label: The cell in a few words, for progress lines.
        timeout_s: When its process is killed.
        store: File that its record is appended to.
        trace: Whether memory at every call of a phase is wanted too.
        explain: Whether the record is to say what occupied the memory.
        profile: Folder to keep the framework's own profile in; None: not wanted.
        tensorboard: Folder to write memory by phase and step to, as TensorBoard's scalars; None: not wanted.
    """

    cell: Cell
    label: str
    timeout_s: float
    store: Path
    trace: bool = False
    explain: bool = False
    profile: Path | None = None
    tensorboard: Path | None = None
