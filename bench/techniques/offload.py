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

    def __new__(cls, value: Any) -> Offload:
        """Parameters act through a hook of the workload and round; the other kinds do neither."""
        return super().__new__(_OffloadedParameters if "parameters" in str(value).split("+") else cls)

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

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Saved tensors to the host, if asked."""
        if not self._asks("activations"):
            return nullcontext()
        return save_on_cpu(pin_memory=device.type != "cpu", device_type=device.type)

    def around_update(
        self, optimizers: Iterable[torch.optim.Optimizer], device: torch.device
    ) -> AbstractContextManager[None]:
        """Optimizer states on the card for the update only, if asked."""
        return _visiting(list(optimizers), device) if self._asks("optimizer") else nullcontext()


class _OffloadedParameters(Offload):
    """Any value with parameters: FSDP2 shards the workload's units, in whatever precision the plan asks for.

    It gathers them as `sharding` does and rounds as that does; and the host's update rounds otherwise than the card's.
    """

    hook: ClassVar[str | None] = "shards"
    fidelity = Fidelity.ROUNDING

    def placed(self, workload: Workload, device: torch.device) -> None:
        """Move sharded parameters to the host; buffers stay on the card."""
        *_, root = cast(Shardable, workload).shards()
        root.to("cpu")
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(device), persistent=name in module.state_dict())


@contextmanager
def _visiting(optimizers: list[torch.optim.Optimizer], device: torch.device) -> Iterator[None]:
    _move(optimizers, lambda state: _to_card(state, device))
    yield
    _move(optimizers, _to_host)


def _move(optimizers: list[torch.optim.Optimizer], to: Callable[[Tensor], Tensor]) -> None:
    for optimizer in optimizers:
        for states in optimizer.state.values():
            for name, state in states.items():
                if isinstance(state, Tensor) and state.dim() > 0:  # step counters live on the host anyway
                    states[name] = to(state)


def _to_card(state: Tensor, device: torch.device) -> Tensor:
    return state.to(device, non_blocking=True)


def _to_host(state: Tensor) -> Tensor:
    # Pinned, so nothing waits for the copy: nobody reads it on the host, and its way back is on the same stream.
    return state.to("cpu", non_blocking=True)
