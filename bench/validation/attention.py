"""The `attention_*` rows: written-out attention on 8 sequences, forward alone and forward with backward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import torch

from bench.validation.cards import Setting, card, setting
from bench.validation.decoder_lm import attend
from bench.validation.measuring import STEADY
from bench.validation.published import Published

BATCH = 8


def predict(row: Published) -> float:
    """Bytes of the row's metric."""
    match = re.fullmatch(r"attention_d(\d+)_l(\d+)_(\w+)", row.id)
    assert match is not None
    return _memory(setting(row), int(match[1]), int(match[2]))[match[3]]


@cache
def _memory(where: Setting, width: int, length: int) -> Mapping[str, int]:
    with where.virtual():
        device = card()
        inputs = [torch.randn(BATCH, length, width, device="vgpu", requires_grad=True) for _ in range(3)]

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            out = attend(*inputs)
            loss = out.sum()
            loss.backward()
            for tensor in inputs:
                tensor.grad = None
            return out, loss

        for _ in range(STEADY):
            out, loss = step()
        device.reset_peak_memory_stats()
        for _ in range(STEADY):
            attend(*inputs)
        forward_peak, after_inputs = device.max_memory_allocated(), device.memory_allocated()
        out = attend(*inputs)
        loss = out.sum()
        before_backward = device.memory_allocated()
        device.reset_peak_memory_stats()
        for _ in range(STEADY):
            step()
        backward_peak = device.max_memory_allocated()
        del out, loss
    return {
        "mem_after_inputs": after_inputs,
        "mem_before_backward": before_backward,
        "forward_peak": forward_peak,
        "backward_peak": backward_peak,
    }
