"""Arithmetic in half precision, by autocast; float16 with loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from bench.techniques.base import Fidelity
from bench.techniques.choice import Choice


class Precision(Choice):
    """`fp32`, or autocast to `fp16` (with a GradScaler) or `bf16`. Weights and optimizer states stay in float32."""

    name: ClassVar[str] = "precision"
    off: ClassVar[Any] = "fp32"
    words = ("fp32", "fp16", "bf16")
    fidelity = Fidelity.ROUNDING

    @property
    def dtype(self) -> torch.dtype | None:
        """The half type, or None in full precision."""
        return {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}[self.value]

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast, unless in full precision."""
        return nullcontext() if self.dtype is None else torch.autocast(device.type, self.dtype)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """The loss scaler; one that does nothing unless in float16."""
        return torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)
