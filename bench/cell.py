"""Runs one cell: builds the workload with its techniques, then a memory pass, then a timing pass."""

from __future__ import annotations

import gc
import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from bench.board import PEAK
from bench.config import Cell
from bench.device import Card, open_card
from bench.errors import Refused
from bench.exhaustion import is_out_of_memory
from bench.moment import Moment
from bench.record import Peak, Record, Source, Status, Timing
from bench.targets import find_target
from bench.techniques import check, fidelity, make_plan
from bench.trainer import Trainer
from bench.vgpu.oom import asking_line
from bench.workload import Traceable, load_workload

Trace = Callable[[int, str, int, int, int], None]
"""Called with step, phase, call, allocated bytes, reserved bytes."""

MOST_SKIPPED = 20
"""Steps of the memory pass that may be run again because loss scaling skipped their update."""


def run_cell(cell: Cell, trace: Trace | None = None, explain: bool = False) -> Record:
    """Run `cell` in this process.

    Args:
        cell: What to run.
        trace: Told the memory at every call of one of the workload's phases, in the memory pass.
        explain: Whether the record is to say what occupied the memory; no number depends on it.

    Returns:
        A record of status ok, oom or refused; whatever else goes wrong is raised.
    """
    return _Run(cell, trace, explain).record()


def explain_cell(cell: Cell, trace: Callable[..., None]) -> Record:
    """Run the memory pass of `cell` and tell `trace` what lived at its last peak, or when memory ran out.

    The first row is the moment, allocated and reserved bytes; each further one is an `Allocation`.
    """
    run = _Run(cell, None, explain=True, timed=False)
    record = run.record()
    if run.explanation is not None:
        moment = run.explanation
        trace(moment.name, moment.allocated_bytes, moment.reserved_bytes)
        for allocation in moment.allocations:
            trace(*allocation)
    return record


class _Run:
    """The state of one cell's run; what it reached stays here when it fails."""

    def __init__(self, cell: Cell, trace: Trace | None, explain: bool = False, timed: bool = True) -> None:
        self.cell = cell
        self.trace = trace
        self.explain = explain
        self.timed = timed
        self.explanation: Moment | None = None
        self.skipped = 0
        self.workload = load_workload(cell.workload)
        preset = self.workload.presets[cell.preset]
        self.settings = type(preset)(**cell.settings)
        self.plan = make_plan(cell.techniques)
        self.facts: dict[str, Any] = {
            "gradient": fidelity(self.plan, make_plan(self.workload.baseline)).value,
            "unit": self.workload.unit,
        }

    def record(self) -> Record:
        try:
            check(self.plan, self.workload, self.settings)
        except Refused as refusal:
            return self._record(Status.REFUSED, str(refusal))
        target = find_target(self.cell.target)
        with open_card(target, self.cell.source, self.explain) as card, _collecting_by_hand():
            return self._on_card(card)

    def _on_card(self, card: Card) -> Record:
        trainer = None
        status, reason = Status.OK, None
        card.module.reset_peak_memory_stats()
        try:
            trainer = self._build(card)
            self._memory_pass(trainer, card)
            if self.timed:
                self._timing_pass(trainer, card)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            status, reason = Status.OOM, _explained(error)
            if trainer is None:
                card.mark_all("parameters")
            else:
                trainer.mark_gradients()
                trainer.mark_optimizer()
            self.facts["steady" if "first" in self.facts else "first"] = _peak(card)
            self._explain(card, at_failure=True)
        self.facts["notes"] = self._notes(card)
        return self._record(status, reason)

    def _build(self, card: Card) -> Trainer:
        torch.manual_seed(0)
        trainer = Trainer(self.workload, self.settings, self.plan, card.device, card.mark)
        card.mark_all("parameters")
        for name, network in trainer.workload.networks.items():
            card.name(network, name)
        self.facts["items_per_step"] = trainer.workload.items_per_step
        self.facts["parameter_counts"] = _parameter_counts(trainer)
        return trainer

    def _memory_pass(self, trainer: Trainer, card: Card) -> None:
        """Steps with their peaks; one whose update loss scaling skips is run again, as it lacks what the update takes.

        GradScaler starts at 65536 (torch/amp/grad_scaler.py) and halves the scale until the gradients are finite.
        """
        reported = 0
        while reported < self.cell.steps.memory:
            gc.collect()
            card.module.reset_peak_memory_stats()
            hooks = self._follow(trainer, card, reported + self.skipped)
            scale = trainer.loss_scale()
            self._traced_step(trainer, card, reported + self.skipped)
            for hook in hooks:
                hook.remove()
            if trainer.loss_scale() < scale:
                self.skipped += 1
                if self.skipped <= MOST_SKIPPED:
                    continue
            self.facts["steady" if reported else "first"] = _peak(card)
            reported += 1
        self._explain(card)
        self.facts["static_bytes"] = card.module.memory_allocated()
        self.facts["static_tensor_bytes"] = card.live_tensor_bytes()

    def _traced_step(self, trainer: Trainer, card: Card, step: int) -> None:
        """A step, its memory told after each half and at its peak."""
        trace = self.trace or (lambda *row: None)
        module = card.module
        trainer.gradients()
        trace(step, "gradients", 0, module.memory_allocated(), module.memory_reserved())
        trainer.update()
        module.synchronize()
        trace(step, "update", 0, module.memory_allocated(), module.memory_reserved())
        trace(step, PEAK, 0, module.max_memory_allocated(), module.max_memory_reserved())

    def _notes(self, card: Card) -> list[str]:
        said = f"loss scaling skipped the update of {min(self.skipped, MOST_SKIPPED)} step"
        if self.skipped > MOST_SKIPPED:
            return [*card.notes(), f"{said}s and more: figures may lack optimizer states"]
        return [*card.notes(), *([f"{said}{'s' * (self.skipped > 1)}, not reported"] if self.skipped else [])]

    def _explain(self, card: Card, at_failure: bool = False) -> None:
        """Keep what lived at the latest peak, or when memory ran out, if anybody asks and the card can tell."""
        allocations = card.allocations(at_failure)
        if allocations is None:
            return
        if at_failure:
            name, reserved_bytes = "out of memory", card.module.memory_reserved()
        else:
            name, reserved_bytes = "peak of a step", card.module.max_memory_reserved()
        self.explanation = Moment(name, reserved_bytes, allocations)
        self.facts["explanation"] = self.explanation.text()

    def _follow(self, trainer: Trainer, card: Card, step: int) -> list[Any]:
        """Hooks that report memory at every call of a phase."""
        trace = self.trace
        if trace is None or not hasattr(trainer.workload, "phases"):
            return []
        calls: dict[str, int] = {}

        def hook_for(phase: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                calls[phase] = calls.get(phase, -1) + 1
                trace(step, phase, calls[phase], card.module.memory_allocated(), card.module.memory_reserved())

            return hook

        phases = cast(Traceable, trainer.workload).phases()
        return [module.register_forward_pre_hook(hook_for(phase)) for phase, module in phases.items()]

    def _timing_pass(self, trainer: Trainer, card: Card) -> None:
        module = card.module
        for _ in range(self.cell.steps.warmup):
            trainer.step()
        seconds = []
        spent = card.spent_s()
        for _ in range(self.cell.steps.timed):
            gc.collect()
            start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
            module.synchronize()
            start.record()
            trainer.step()
            end.record()
            module.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        bound_s = {
            bound: (total - spent.get(bound, 0.0)) / self.cell.steps.timed for bound, total in card.spent_s().items()
        }
        self.facts["timing"] = Timing(statistics.median(seconds), bound_s)

    def _record(self, status: Status, reason: str | None) -> Record:
        cell = self.cell
        return Record(
            key=cell.key, cell=cell.to_dict(), status=status, source=Source(cell.source), reason=reason, **self.facts
        )


@contextmanager
def _collecting_by_hand() -> Iterator[None]:
    """No garbage collection but between steps: when it strikes decides when memory in cycles is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _parameter_counts(trainer: Trainer) -> dict[str, int]:
    """Parameters by part of each network, shared ones counted once a part."""
    return {
        ".".join(filter(None, (name, part))): sum(parameter.numel() for parameter in module.parameters())
        for name, network in trainer.workload.networks.items()
        for part, module in (dict(network.named_children()) or {"": network}).items()
        if any(True for _ in module.parameters())
    }


def _peak(card: Card) -> Peak:
    module = card.module
    reserved_bytes = module.max_memory_reserved()
    return Peak(
        allocated_bytes=module.max_memory_allocated(),
        reserved_bytes=reserved_bytes,
        process_bytes=card.process_bytes(reserved_bytes),
        categories=card.peak_categories(),
    )


def _explained(error: RuntimeError) -> str:
    """The error's message without CUDA's hints to programmers below it; a real card's with the line that asked."""
    message = str(error).partition("\n")[0].rstrip()
    if hasattr(error, "line"):
        return message
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return f"{message.removesuffix('.')}. Asked for at {asking_line(frames[-1])}."
