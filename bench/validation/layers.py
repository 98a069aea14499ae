"""Rows of single layers: cross entropy, layer norm, RMS norm, a gated MLP, and the workspace that one Linear leaves.

Each row was taken on a module and an input of its own, in a process that had run the whole before, so that both
threads' cuBLAS workspaces exist. Gradients accumulate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.validation.cards import Setting, card, setting
from bench.validation.measuring import peak_bytes, seconds
from bench.validation.published import Published

Measure = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Layer:
    """What runs the forward, what makes the gradient of its output (None: a loss), and what else is on the card."""

    forward: Callable[[], Tensor]
    gradient: Callable[[Tensor], Tensor | None]
    beside: nn.Module | None = None


class LlamaRmsNorm(nn.Module):
    """Normalises in float32 and returns to the input's type before the weight, which is float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, values: Tensor) -> Tensor:
        """Same shape; the type that weight and input promote to."""
        wide = values.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + 1e-6)
        return self.weight * wide.to(values.dtype)


class GatedMlp(nn.Module):
    """Llama's MLP with a tanh GELU: 2048 to 4096 and back, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(2048, 4096, bias=False), nn.Linear(2048, 4096, bias=False)
        self.down = nn.Linear(4096, 2048, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """[batch, tokens, 2048] to the same shape."""
        out: Tensor = self.down(F.gelu(self.gate(values), approximate="tanh") * self.up(values))
        return out


def _cross_entropy(vocabulary: int) -> Layer:
    logits = torch.randn(16384, vocabulary, device="vgpu", requires_grad=True)
    targets = torch.randint(vocabulary, (16384,), device="vgpu")
    return Layer(partial(nn.CrossEntropyLoss(), logits, targets), lambda out: None)


def _norm(kind: Callable[[int], nn.Module], rows: int, dtype: torch.dtype, width: int) -> Layer:
    """A norm, and beside it another of the same size, which the benchmark compares it with.

    The gradient has the type of the input, whatever type the output has.
    """
    rival, norm = kind(width).to("vgpu"), kind(width).to("vgpu")
    values = torch.randn(rows, width, dtype=dtype, device="vgpu")
    gradient = torch.randn_like(values)
    return Layer(partial(norm, values.requires_grad_()), lambda out: gradient, rival)


def _mlp(tokens: int) -> Layer:
    mlp = GatedMlp().to("vgpu", torch.bfloat16)
    values = torch.randn(2, tokens, 2048, dtype=torch.bfloat16, device="vgpu", requires_grad=True)
    return Layer(partial(mlp, values), torch.randn_like)


_LAYERS: Mapping[str, Callable[[int], Layer]] = {
    "cross_entropy": _cross_entropy,
    "layer_norm": partial(_norm, nn.LayerNorm, 4096, torch.float32),
    "rms_norm": partial(_norm, LlamaRmsNorm, 2048, torch.bfloat16),
    "llama_mlp_geglu": _mlp,
}


def predict(row: Published) -> float:
    """Bytes or seconds of the row's metric."""
    match = re.fullmatch(r"(\w+)_[a-z](\d+)(?:_(full|forward|backward))?(?:_ms)?", row.id)
    assert match is not None
    peaks, times = _measured(setting(row), match[1], int(match[2]))
    return (times if row.unit == "ms" else peaks)[match[3] or "full"]


@cache
def _measured(where: Setting, kind: str, size: int) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Peaks in bytes and times in seconds of `full`, `forward` and `backward`."""
    modes = ("full", "forward", "backward")
    with where.virtual():
        times = {mode: run(kind, size, mode, seconds) for mode in modes}
        peaks = {mode: run(kind, size, mode, peak_bytes) for mode in modes}
    return peaks, times


def run(kind: str, size: int, mode: str, measure: Measure) -> float:
    """What `measure` says of `full`, `forward` or `backward` of a layer, made anew on the current virtual card."""
    layer = _LAYERS[kind](size)
    if mode == "forward":
        return measure(layer.forward)

    def full() -> None:
        out = layer.forward()
        out.backward(layer.gradient(out), retain_graph=True)

    if mode == "full":
        return measure(full)
    out = layer.forward()
    gradient = layer.gradient(out)
    return measure(lambda: out.backward(gradient, retain_graph=True))


def predict_workspace(row: Published) -> float:
    """Bytes that stay after Linear(1, 1) ran forward and everything was freed."""
    with setting(row).virtual():
        linear = nn.Linear(1, 1).to("vgpu")
        linear(torch.randn(1, 1, device="vgpu"))
        del linear
        return float(card().memory_allocated())
