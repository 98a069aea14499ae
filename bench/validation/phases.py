"""Peaks of a training step phase by phase: a decoder LM of 3.4 billion parameters, float32 and bf16 autocast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import bench.vgpu as vgpu
from bench.validation.cards import card
from bench.validation.decoder_lm import BATCH, SIZES, VOCABULARY, DecoderLm, WalkingAdamW, cross_entropy
from bench.validation.lm_step import PHASES, Step
from bench.validation.measuring import STEADY
from bench.vgpu import Target

CONTEXTS = (128, 512)


@dataclass(frozen=True)
class PhasePeaks:
    """Bytes allocated at the peak of each phase that was reached, in a step that repeats itself.

    Attributes:
        step: What ran.
        peaks_bytes: By phase, in order.
        between_bytes: What stays allocated after the step: weights, gradients, moments, workspaces.
        out_of_memory: Why the step ended early, if it did.
    """

    step: Step
    peaks_bytes: dict[str, int]
    between_bytes: int
    out_of_memory: str | None


def all_phase_peaks(target: Target, size: str = "3.4b") -> Iterator[PhasePeaks]:
    """Contexts of 128 and 512, float32 and bf16 autocast, torch's AdamW and the one that walks its parameters."""
    for walking, autocast, context in itertools.product((False, True), (False, True), CONTEXTS):
        yield phase_peaks(target, Step(size, context, walking, autocast))


def phase_peaks(target: Target, step: Step) -> PhasePeaks:
    """Run `step` on a virtual card until it repeats itself, and read the peak of each of its phases."""
    peaks: dict[str, int] = {}
    failure = None
    with vgpu.virtual_gpu(target):
        device = card()
        try:
            model = DecoderLm(SIZES[step.size], step.context).to("vgpu")
            optimizer = WalkingAdamW(model.parameters()) if step.walking else torch.optim.AdamW(model.parameters())
            tokens, labels = (torch.randint(VOCABULARY, (BATCH, step.context), device="vgpu") for _ in range(2))
            for _ in range(STEADY + 1):
                optimizer.zero_grad(set_to_none=True)
                peaks.clear()
                device.reset_peak_memory_stats()
                with torch.autocast("vgpu", torch.bfloat16, enabled=step.autocast):
                    loss = cross_entropy(model(tokens), labels)
                for phase, go_on in zip(PHASES, (loss.backward, optimizer.step, lambda: None), strict=True):
                    peaks[phase] = int(device.max_memory_allocated())
                    device.reset_peak_memory_stats()
                    go_on()
                del loss, go_on
        except torch.OutOfMemoryError as error:
            failure = str(error)
        return PhasePeaks(step, dict(peaks), int(device.memory_allocated()), failure)


def as_table(target: Target) -> str:
    """Every combination in a line, in GiB."""
    from bench.validation.show import table

    heads = ["AdamW", "precision", "context", *(f"{phase} GiB" for phase in PHASES), "after the step GiB", ""]
    lines = []
    for found in all_phase_peaks(target):
        step = found.step
        cells = [f"{found.peaks_bytes[phase] / 2**30:.3f}" if phase in found.peaks_bytes else "-" for phase in PHASES]
        lines.append(
            [
                "walks its parameters" if step.walking else "torch.optim",
                "bf16 autocast" if step.autocast else "fp32",
                str(step.context),
                *cells,
                "-" if found.out_of_memory else f"{found.between_bytes / 2**30:.3f}",
                "out of memory" if found.out_of_memory else "",
            ]
        )
    return table(heads, lines)
