"""What a technique is: one toggle with a value, which knows no workload."""

from __future__ import annotations

from abc import ABC
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from bench.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from bench.workload import Workload


class Fidelity(StrEnum):
    """What a technique does to the gradient. The order is from best to worst."""

    EXACT = "exact"
    ROUNDING = "rounding"
    CHANGES = "changes training"


class Technique(ABC):
    """One toggle. Subclasses override the moments of a run that they act on.

    Attributes:
        name: As in `technique.<name>=...`.
        off: The value that does nothing.
        hook: The method of a workload that the technique acts through, if it needs one.
        field: The field of a workload's settings that the technique replaces, if it does.
        fidelity: What any other value than `off` does to the gradient.
    """

    name: ClassVar[str]
    off: ClassVar[Any]
    hook: ClassVar[str | None] = None
    field: ClassVar[str | None] = None
    fidelity: ClassVar[Fidelity]

    def __init__(self, value: Any) -> None:
        self.value = self.parse(value)

    @classmethod
    def parse(cls, value: Any) -> Any:
        """The value in its proper type.

        Raises:
            BadInput: The technique has no such value; the message names the nearest right word.
        """
        raise NotImplementedError

    @property
    def active(self) -> bool:
        """Whether the value differs from off."""
        return bool(self.value != self.off)

    def check(self, workload: type[Workload], settings: Any) -> None:
        """Raise `Refused` where the workload lacks what the technique acts through."""
        if not self.active:
            return
        if self.hook is not None and not hasattr(workload, self.hook):
            raise Refused(f"{workload.__name__} cannot take {self.name}={self.value}: it has no {self.hook}()")
        if self.field is not None and not hasattr(settings, self.field):
            raise Refused(
                f"{workload.__name__} cannot take {self.name}={self.value}: its settings have no {self.field!r}"
            )

    def obstacle(self, plan: Mapping[str, Technique]) -> str | None:
        """Why the other techniques leave nothing to act on; None where they do not."""
        return None

    def settings(self, settings: Any) -> Any:
        """The workload's settings with the technique applied."""
        return settings

    def prepare(self, workload: Workload, plan: Mapping[str, Technique], device: torch.device) -> None:  # noqa: B027
        """Act on the networks: built, not yet placed on the device."""

    def placed(self, workload: Workload, device: torch.device) -> None:  # noqa: B027
        """Act on the networks once they are on the device."""

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context around each micro-batch's losses."""
        return nullcontext()

    def around_update(
        self, optimizers: Iterable[torch.optim.Optimizer], device: torch.device
    ) -> AbstractContextManager[Any]:
        """Context around the optimizers' steps."""
        return nullcontext()

    def before_update(self, networks: Iterable[torch.nn.Module]) -> None:  # noqa: B027
        """Act on the gradients, complete and unscaled, before the optimizers."""
