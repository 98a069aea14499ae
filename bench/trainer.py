"""One training step with its techniques, written once for every workload and every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor

from bench.errors import BadInput
from bench.techniques import Technique
from bench.techniques.precision import Precision
from bench.workload import Workload

Mark = Callable[[Iterable[Tensor], str], None]


class Trainer:
    """A workload, built with its techniques on a device, ready to step.

    Args:
        workload: The class.
        settings: Its settings; techniques that change settings are applied here.
        plan: Every technique, by name.
        device: Where to train.
        mark: Told what tensors are for ("gradients" | "optimizer"), if anybody asks.
    """

    def __init__(
        self,
        workload: type[Workload],
        settings: Any,
        plan: Mapping[str, Technique],
        device: torch.device,
        mark: Mark | None = None,
    ) -> None:
        for technique in plan.values():
            settings = technique.settings(settings)
        self.plan = plan
        self.device = device
        self.workload = workload(settings)
        for technique in plan.values():
            technique.prepare(self.workload, plan, device)
        self.workload.place(device)
        for technique in plan.values():
            technique.placed(self.workload, device)
        self.optimizers = self.workload.optimizers()
        self._mark = mark
        self._scaler = cast(Precision, plan["precision"]).scaler(device)
        self._micro_batches: int = plan["accumulation"].value

    def step(self) -> None:
        """One update: forward and backward of every micro-batch, then the optimizers."""
        self.gradients()
        self.update()

    def gradients(self) -> None:
        """Clear the gradients and fill them anew, scaled as the precision asks.

        Raises:
            BadInput: The workload yields another number of micro-batches than it was asked for.
        """
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=self.plan["set_to_none"].value)
        yielded = 0
        for micro_batch in self.workload.micro_batches(self._micro_batches):
            yielded += 1
            losses = self._losses(micro_batch)
            while (loss := self._next_loss(losses)) is not None:
                self._scaler.scale(loss / self._micro_batches).backward()
                del loss
        if yielded != self._micro_batches:
            called = f"{type(self.workload).__name__}.micro_batches({self._micro_batches})"
            raise BadInput(f"{called} yielded {yielded} micro-batch{'es' * (yielded != 1)}")
        self.mark_gradients()

    def _losses(self, micro_batch: Any) -> Iterator[Tensor]:
        """The workload's losses; one that computes all of them in the call is not called before the first is asked."""
        yield from self.workload.losses(micro_batch)

    def _next_loss(self, losses: Iterator[Tensor]) -> Tensor | None:
        """The next loss, computed under the techniques' contexts; its backward runs outside them."""
        with ExitStack() as contexts:
            for technique in self.plan.values():
                contexts.enter_context(technique.forward(self.device))
            return next(losses, None)

    def update(self) -> None:
        """Step the optimizers on the gradients."""
        optimizers = self.optimizers.values()
        if self.plan["clip"].active:
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
        for technique in self.plan.values():
            technique.before_update(self.workload.networks.values())
        with ExitStack() as contexts:
            for technique in self.plan.values():
                contexts.enter_context(technique.around_update(optimizers, self.device))
            for optimizer in optimizers:
                self._scaler.step(optimizer)
            self.mark_optimizer()
        self._scaler.update()
        self.workload.finish_step()

    def loss_scale(self) -> float:
        """What losses are multiplied by; GradScaler lowers it after an update that it has skipped. The host waits."""
        return self._scaler.get_scale()

    def mark_gradients(self) -> None:
        """Say which tensors are gradients now, if anybody asks: to look for them takes time."""
        if self._mark is None:
            return
        parameters = [p for network in self.workload.networks.values() for p in network.parameters()]
        self._mark([p.grad for p in parameters if p.grad is not None], "gradients")

    def mark_optimizer(self) -> None:
        """Say which tensors are optimizer states now, if anybody asks."""
        if self._mark is None:
            return
        for optimizer in self.optimizers.values():
            for states in optimizer.state.values():
                self._mark([state for state in states.values() if isinstance(state, Tensor)], "optimizer")
