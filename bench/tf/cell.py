"""Runs one TensorFlow cell: on the card of this machine, or on its processor with the card's allocator."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.board import PEAK
from bench.config import Cell
from bench.errors import Refused
from bench.frameworks import find_framework
from bench.record import Peak, Record, Source, Status, Timing
from bench.targets import find_target
from bench.techniques import check, fidelity, make_plan
from bench.tf.device import Device, Emulated, Present
from bench.tf.techniques import Allocation, Beside
from bench.workload import load_workload

if TYPE_CHECKING:
    from bench.tf.trainer import Trainer

Trace = Callable[[int, str, int, int, int | None], None]
"""Called with step, phase, call, bytes in use; what the allocator holds is not known then."""


def run_cell(cell: Cell, trace: Trace | None = None, profile: Path | None = None) -> Record:
    """Run `cell` in this process, which must not hold another framework.

    Args:
        cell: What to run.
        trace: Told the memory after every phase of a step, and at its peak.
        profile: Folder to keep TensorFlow's profiles in.

    Returns:
        A record of status ok, oom or refused; whatever else goes wrong is raised.
    """
    return _Run(cell, trace).record(profile)


class _Run:
    """The state of one cell's run; what it reached stays here when it fails."""

    def __init__(self, cell: Cell, trace: Trace | None) -> None:
        self.cell = cell
        self.trace = trace
        self.workload = load_workload(cell.workload)
        preset = self.workload.presets[cell.preset]
        self.settings = type(preset)(**cell.settings)
        self.plan = make_plan(cell.techniques, "tensorflow")
        self.peaks: list[Peak] = []
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {
            "gradient": fidelity(self.plan, make_plan(self.workload.baseline, "tensorflow")).value,
            "unit": self.workload.unit,
        }

    def record(self, profile: Path | None) -> Record:
        try:
            check(self.plan, self.workload, self.settings)
            find_framework("tensorflow").check_installed()
            device = self._device(profile)
        except Refused as refusal:
            return self._record(Status.REFUSED, str(refusal))
        try:
            return self._on(device)
        finally:
            device.close()

    def _device(self, profile: Path | None) -> Device:
        kind = Emulated if self.cell.source is Source.EMULATED else Present
        allocation, beside = cast(Allocation, self.plan["allocation"]), cast(Beside, self.plan["beside"])
        device = kind(find_target(self.cell.target), allocation, beside, profile)
        with _silent():
            device.configure()
        return device

    def _on(self, device: Device) -> Record:
        import tensorflow as tf

        tf.keras.utils.set_random_seed(0)
        status, reason = Status.OK, None
        try:
            trainer = self._build(device)
            self._memory_pass(trainer, device)
            if device.timed:
                self._timing_pass(trainer)
        except tf.errors.ResourceExhaustedError as error:
            status, reason = Status.OOM, device.failure(error)
            self.peaks.append(device.peak())
        peaks, obstacle = device.completed(self.peaks)
        if obstacle is not None and status is Status.OK:
            status, reason = Status.OOM, obstacle
        if peaks:
            self.facts["first"] = peaks[0]
            self.facts["steady"] = peaks[-1] if len(peaks) > 1 else None
        self.facts["notes"] = [*device.notes(), *_remarks(self.cell.techniques), *self.notes]
        return self._record(status, reason)

    def _build(self, device: Device) -> Trainer:
        from bench.tf.trainer import Trainer

        with device.part("build"):
            trainer = Trainer(self.workload, self.settings, self.plan)
        self.facts["parameter_counts"] = trainer.parameter_counts()
        self.facts["items_per_step"] = trainer.workload.items_per_step
        return trainer

    def _memory_pass(self, trainer: Trainer, device: Device) -> None:
        traces = []
        for step in range(self.cell.steps.memory):
            device.reset_peak()
            with device.part(f"step_{step}"):
                trainer.step(_Phases(self.trace, device, step))
                gc.collect()
            self.peaks.append(device.peak())
            traces.append(trainer.traces)
            if self.trace is not None:
                self.trace(step, PEAK, 0, self.peaks[-1].allocated_bytes, None)
        self.facts["static_bytes"] = device.in_use_bytes()
        self.facts["static_tensor_bytes"] = trainer.static_tensor_bytes()
        self.facts["traces"] = traces[-1]
        if len(traces) > 1 and traces[-1] - traces[0] >= len(traces) - 1:
            self.notes.append(f"RETRACES: TensorFlow traces the step anew every time ({traces[-1]} traces in all)")

    def _timing_pass(self, trainer: Trainer) -> None:
        import tensorflow as tf

        for _ in range(self.cell.steps.warmup):
            trainer.step()
        seconds = []
        for _ in range(self.cell.steps.timed):
            gc.collect()
            tf.test.experimental.sync_devices()
            start_s = time.perf_counter()
            trainer.step()
            tf.test.experimental.sync_devices()
            seconds.append(time.perf_counter() - start_s)
        self.facts["timing"] = Timing(statistics.median(seconds))

    def _record(self, status: Status, reason: str | None) -> Record:
        cell = self.cell
        return Record(
            key=cell.key, cell=cell.to_dict(), status=status, source=Source(cell.source), reason=reason, **self.facts
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Without what TensorFlow's libraries tell on stderr of cards and instruction sets when they are loaded."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


class _Phases:
    """Tells the memory after every call of a phase of one step."""

    def __init__(self, trace: Trace | None, device: Device, step: int) -> None:
        self._trace = trace
        self._device = device
        self._step = step
        self._calls: Counter[str] = Counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        yield
        if self._trace is not None:
            self._trace(self._step, name, self._calls[name], self._device.in_use_bytes(), None)
            self._calls[name] += 1


def _remarks(techniques: dict[str, Any]) -> list[str]:
    """What the processor does otherwise than a card."""
    remarks = []
    if techniques["precision"] != "fp32":
        remarks.append("half precision on the processor keeps copies in float32 that a card does not: an upper bound")
    if techniques["xla"]:
        remarks.append("XLA compiled the step for the processor: its temporaries are not those of a card")
    else:
        remarks.append("without XLA, TensorFlow orders operators anew in every process: peaks vary by some percent")
    return remarks
