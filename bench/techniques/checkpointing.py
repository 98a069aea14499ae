"""Recompute activations in the backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch.utils.checkpoint import checkpoint

from bench.techniques.base import Fidelity, Technique
from bench.techniques.choice import Choice
from bench.workload import Checkpointable, Workload


class Checkpointing(Choice):
    """`on` checkpoints the workload's blocks without re-entering autograd; `reentrant` is the older kind."""

    name: ClassVar[str] = "checkpointing"
    off: ClassVar[Any] = "off"
    hook: ClassVar[str | None] = "blocks"
    words = ("off", "on", "reentrant")
    fidelity = Fidelity.EXACT

    def prepare(self, workload: Workload, plan: Mapping[str, Technique], device: torch.device) -> None:
        """Wrap the forward of each block."""
        if not self.active:
            return
        for block in cast(Checkpointable, workload).blocks():
            block.forward = partial(self._recomputed, block.forward)

    def _recomputed(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.value == "on":
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # The re-entrant kind takes no keyword arguments, and gives no gradient unless some input requires one: a
        # block that only its own weights make differentiable needs an empty tensor that does.
        spark = torch.empty(0, requires_grad=True)
        return checkpoint(lambda _, *inputs: forward(*inputs, **kwargs), spark, *args, use_reentrant=True)
