"""The `decoder_lm_*` rows: peak of a training step, times of its phases, whether it fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

import bench.vgpu as vgpu
from bench.validation.cards import Setting, card, setting
from bench.validation.decoder_lm import BATCH, SIZES, VOCABULARY, DecoderLm, WalkingAdamW, cross_entropy
from bench.validation.measuring import STEADY
from bench.validation.published import Published
from bench.vgpu import Target

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Step:
    """A training step of batch 4.

    Attributes:
        size: Name of the model's size.
        context: Tokens of a sequence.
        walking: Whether the AdamW is the one that walks its parameters; else it is torch's at its defaults.
        autocast: Whether the forward runs under bf16 autocast.
    """

    size: str
    context: int
    walking: bool = False
    autocast: bool = False


@dataclass(frozen=True)
class Costs:
    """What a step costs after warm-up, the host waiting for the card after each phase."""

    peak_bytes: int
    seconds: Mapping[str, float]


def predict_peak(row: Published) -> float:
    """Bytes allocated at the peak of a step, with the AdamW that walks the parameters."""
    size, context = _groups(r"decoder_lm_(\w+)_step_ctx(\d+)", row)
    return _on(setting(row), Step(size, int(context), walking=True)).peak_bytes


def predict_phase(row: Published) -> float:
    """Seconds of one phase."""
    size, context, phase = _groups(r"decoder_lm_([a-z]+)_ctx(\d+)_(\w+)_ms", row)
    return _on(setting(row), Step(size, int(context))).seconds[phase]


def predict_step(row: Published) -> float:
    """Seconds of a whole step at context 512, in float32 or under bf16 autocast.

    The rows do not say which AdamW ran. With torch's, both float32 rows are out of reach of any cost of the host, as
    the card has not that much to do; with the one that walks the parameters, one cost explains all four.
    """
    size, precision = _groups(r"decoder_lm_([a-z]+)_(fp32|bf16)_h100_step_ms", row)
    return sum(_on(setting(row), Step(size, 512, walking=True, autocast=precision == "bf16")).seconds.values())


def predict_fit(row: Published) -> float:
    """Whether training steps fit the card: 1 or 0."""
    size, context = _groups(r"decoder_lm_([a-z]+)_ctx(\d+)_fits", row)
    try:
        _on(setting(row), Step(size, int(context)))
    except torch.OutOfMemoryError:
        return 0.0
    return 1.0


def _groups(pattern: str, row: Published) -> tuple[str, ...]:
    match = re.fullmatch(pattern, row.id)
    assert match is not None
    return match.groups()


@cache
def _on(where: Setting, step: Step) -> Costs:
    return costs(where.target, where.release, step)


def costs(target: Target, release: tuple[int, int], step: Step) -> Costs:
    """Run the step on a virtual card until it repeats itself.

    Raises:
        torch.OutOfMemoryError: It does not fit.
    """
    with vgpu.virtual_gpu(target, release) as simulated:
        device = card()
        model = DecoderLm(SIZES[step.size], step.context).to("vgpu")
        optimizer = WalkingAdamW(model.parameters()) if step.walking else torch.optim.AdamW(model.parameters())
        tokens, targets = (torch.randint(VOCABULARY, (BATCH, step.context), device="vgpu") for _ in range(2))
        seconds: dict[str, float] = {}
        for _ in range(STEADY + 1):
            device.reset_peak_memory_stats()
            optimizer.zero_grad(set_to_none=True)
            device.synchronize()
            stamps = [simulated.clock.host_s]
            with torch.autocast("vgpu", torch.bfloat16, enabled=step.autocast):
                loss = cross_entropy(model(tokens), targets)
            for phase in (lambda: None, loss.backward, optimizer.step):
                phase()
                device.synchronize()
                stamps.append(simulated.clock.host_s)
            seconds = {name: end - start for name, start, end in zip(PHASES, stamps, stamps[1:], strict=False)}
            del loss
        return Costs(int(device.max_memory_allocated()), seconds)
