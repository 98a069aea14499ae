"""The step itself: what it holds around a workload's losses, however the workload hands them over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from bench.techniques import make_plan
from bench.trainer import Trainer


@dataclass(frozen=True)
class Settings:
    batch_size: int = 4


class Line:
    """Two losses a micro-batch; notes in which precision they were computed."""

    presets: ClassVar[Mapping[str, Any]] = {"only": Settings()}
    baseline: ClassVar[Mapping[str, Any]] = {}
    unit = "samples"
    items_per_step = 4

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.network = nn.Linear(3, 1)
        self.networks = {"line": self.network}
        self.computed: list[torch.dtype] = []

    def place(self, device: torch.device) -> None: ...

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"line": torch.optim.SGD(self.network.parameters(), lr=0.1)}

    def micro_batches(self, count: int) -> Iterable[Tensor]:
        return torch.arange(12.0).view(4, 3).chunk(count)

    def losses(self, micro_batch: Tensor) -> Iterable[Tensor]:
        for power in (1, 2):
            output = self.network(micro_batch)
            self.computed.append(output.dtype)
            yield output.float().pow(power).mean()

    def finish_step(self) -> None: ...


class Listed(Line):
    """Computes all of its losses in the call."""

    def losses(self, micro_batch: Tensor) -> list[Tensor]:
        return list(super().losses(micro_batch))


@pytest.mark.parametrize("kind", [Line, Listed])
def test_losses_are_computed_under_the_techniques(kind: type[Line]) -> None:
    plan = make_plan({"precision": "bf16", "accumulation": 2})
    trainer = Trainer(kind, Settings(), plan, torch.device("cpu"))  # type: ignore[arg-type]
    trainer.gradients()
    assert trainer.workload.computed == [torch.bfloat16] * 4  # type: ignore[attr-defined]
