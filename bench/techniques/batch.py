"""How many samples a step takes, and in how many parts: batch size and gradient accumulation."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from bench.errors import BadInput
from bench.techniques.base import Fidelity, Technique
from bench.workload import Workload


def positive_integer(name: str, value: Any) -> int:
    """`value` as a positive integer.

    Raises:
        BadInput: It is none.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise BadInput(f"technique {name} takes a positive whole number, not {value!r}")


class BatchSize(Technique):
    """Samples a step; None keeps the preset's."""

    name: ClassVar[str] = "batch_size"
    off: ClassVar[Any] = None
    field: ClassVar[str | None] = "batch_size"
    fidelity = Fidelity.CHANGES

    @classmethod
    def parse(cls, value: Any) -> int | None:
        """A positive integer, or None."""
        return None if value is None else positive_integer(cls.name, value)

    def settings(self, settings: Any) -> Any:
        """Replace the settings' batch size."""
        return dataclasses.replace(settings, batch_size=self.value) if self.active else settings


class Accumulation(Technique):
    """Micro-batches a step: their gradients add up before one update."""

    name: ClassVar[str] = "accumulation"
    off: ClassVar[Any] = 1
    fidelity = Fidelity.ROUNDING

    @classmethod
    def parse(cls, value: Any) -> int:
        """A positive integer."""
        return positive_integer(cls.name, value)

    def check(self, workload: type[Workload], settings: Any) -> None:
        """Refuse nothing; a batch that does not divide is the user's to correct."""
        if settings.batch_size % self.value:
            raise BadInput(f"batch size {settings.batch_size} is not divisible by accumulation {self.value}")
