"""One set of parameters for several users: agents, embeddings."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from bench.techniques.base import Fidelity
from bench.techniques.choice import Choice


class Sharing(Choice):
    """`shared` or `separate` parameters, through the workload's setting of that name; None keeps the preset's."""

    name: ClassVar[str] = "sharing"
    off: ClassVar[Any] = None
    field: ClassVar[str | None] = "sharing"
    words = ("shared", "separate")
    fidelity = Fidelity.CHANGES

    @classmethod
    def parse(cls, value: Any) -> str | None:
        """One of the words, or None."""
        return None if value is None else super().parse(value)

    def settings(self, settings: Any) -> Any:
        """Replace the settings' sharing."""
        return dataclasses.replace(settings, sharing=self.value) if self.active else settings
