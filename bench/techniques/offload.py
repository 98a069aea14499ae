"""Keep on the host what the card does not need at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from bench.errors import BadInput, unknown
from bench.techniques.base import Fidelity, Technique
from bench.workload import Shardable, Workload

KINDS = ("activations", "optimizer", "parameters")


class Offload(Technique):
    """`off`, or one or more of activations, optimizer, parameters, joined by `+`.

    * activations: what autograd saves goes to pinned host memory and comes back in the backward (`save_on_cpu`).
    * optimizer: its states live in pinned host memory and visit the card for the update (verl's optimizer_offload).
    * parameters: FSDP2's CPUOffloadPolicy: parameters, gradients and the update itself live on the host.
    """

    name: ClassVar[str] = "offload"
    off: ClassVar[Any] = "off"
    fidelity = Fidelity.EXACT

    @classmethod
    def parse(cls, value: Any) -> str:
        """`off`, or KINDS joined by `+`, in the order of KINDS."""
        if value is False or value == "off":
            return "off"
        asked = str(value).split("+")
        for word in asked:
            if word not in KINDS:
                raise unknown("offload value", word, ("off", *KINDS))
        if "optimizer" in asked and "parameters" in asked:
            raise BadInput("offload=parameters keeps optimizer states on the host already: leave out optimizer")
        return "+".join(kind for kind in KINDS if kind in asked)

    def _asks(self, kind: str) -> bool:
        return kind in self.value.split("+")

    @property
    def parameters(self) -> bool:
        """Whether parameters live on the host."""
        return self._asks("parameters")

    def check(self, workload: type[Workload], settings: Any) -> None:
        """Parameters need units that FSDP2 can wrap."""
        self.hook = "shards" if self.parameters else None  # type: ignore[misc]
        super().check(workload, settings)

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Saved tensors to the host, if asked."""
        if not self._asks("activations"):
            return nullcontext()
        return save_on_cpu(pin_memory=device.type != "cpu", device_type=device.type)

    def placed(self, workload: Workload, device: torch.device) -> None:
        """Move sharded parameters to the host; buffers stay on the card."""
        if not self.parameters:
            return
        *_, root = cast(Shardable, workload).shards()
        root.to("cpu")
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(device), persistent=name in module.state_dict())

    def around_update(
        self, optimizers: Iterable[torch.optim.Optimizer], device: torch.device
    ) -> AbstractContextManager[None]:
        """Optimizer states on the card for the update only, if asked."""
        return _visiting(list(optimizers), device) if self._asks("optimizer") else nullcontext()


@contextmanager
def _visiting(optimizers: list[torch.optim.Optimizer], device: torch.device) -> Iterator[None]:
    _move(optimizers, lambda state: state.to(device, non_blocking=True))
    yield
    _move(optimizers, _to_pinned if device.type != "cpu" else lambda state: state)


def _move(optimizers: list[torch.optim.Optimizer], to: Callable[[Tensor], Tensor]) -> None:
    for optimizer in optimizers:
        for states in optimizer.state.values():
            for name, state in states.items():
                if isinstance(state, Tensor) and state.dim() > 0:  # step counters live on the host anyway
                    states[name] = to(state)


def _to_pinned(state: Tensor) -> Tensor:
    # Nothing waits for the copy: nobody reads it on the host, and its way back is on the same stream.
    return torch.empty_like(state, device="cpu", pin_memory=True).copy_(state, non_blocking=True)
