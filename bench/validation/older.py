"""What autograd did otherwise in releases older than the one that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _SoftmaxKeepingInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int) -> Tensor:
        out = torch.softmax(values, dim)
        ctx.dim = dim
        ctx.save_for_backward(values, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, out = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradients[0], out, ctx.dim, values.dtype), None


def _softmax(values: Tensor, dim: int) -> Tensor:
    out: Tensor = _SoftmaxKeepingInput.apply(values, dim)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def autograd_of(release: tuple[int, int]) -> Iterator[None]:
    """Let `F.softmax` keep what it kept in `release`: before 1.11 its input, too (pull request 65242)."""
    if release >= (1, 11):
        yield
        return
    softmax = F.softmax
    F.softmax = _softmax  # type: ignore[assignment]
    try:
        yield
    finally:
        F.softmax = softmax
