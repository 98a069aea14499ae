"""The step itself: what it holds around a workload's losses, however the workload hands them over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from bench.device import Card
from bench.errors import BadInput
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
        return {"line": torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)}

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


@pytest.mark.parametrize("yielded", [0, 1, 3])
def test_micro_batches_that_are_not_as_many_as_asked_for_are_an_error(yielded: int) -> None:
    class Other(Line):
        def micro_batches(self, count: int) -> Iterable[Tensor]:
            return [torch.ones(2, 3)] * yielded

    trainer = Trainer(Other, Settings(), make_plan({"accumulation": 2}), torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=rf"^Other\.micro_batches\(2\) yielded {yielded} micro-batch(es)?$"):
        trainer.step()


def test_tensors_are_marked_where_the_card_asks() -> None:
    marked: list[str] = []

    def mark(tensors: Iterable[Tensor], category: str) -> None:
        marked.append(category)

    trainer = Trainer(Line, Settings(), make_plan({}), torch.device("cpu"), mark)  # type: ignore[arg-type]
    trainer.step()
    assert marked == ["gradients", "optimizer", "optimizer"]  # the states of the weight and of the bias


def test_nothing_is_looked_up_for_a_card_that_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(torch.device("cpu"))
    trainer = Trainer(Line, Settings(), make_plan({}), card.device, card.mark)  # type: ignore[arg-type]
    looked_up: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "parameters", lambda module: looked_up.append(module) or iter(()))
    trainer.step()
    assert looked_up == []
