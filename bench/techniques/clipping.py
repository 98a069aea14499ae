"""Clip the gradient's norm: a negative control, as it has no mechanism by which it could save memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from bench.errors import BadInput
from bench.techniques.base import Fidelity, Technique

if TYPE_CHECKING:
    from torch import nn


class Clip(Technique):
    """The largest gradient norm of each network, or `off`."""

    name: ClassVar[str] = "clip"
    off: ClassVar[Any] = "off"
    fidelity = Fidelity.CHANGES

    @classmethod
    def parse(cls, value: Any) -> Any:
        """A positive number, or `off`."""
        if value is False or value == "off":
            return "off"
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        raise BadInput(f"technique clip takes a positive number or off, not {value!r}")

    def before_update(self, networks: Iterable[nn.Module]) -> None:
        """Scale each network's gradients so that their norm is no more than the value."""
        if self.active:
            from torch import nn  # on use: other frameworks clip by the same values

            for network in networks:
                nn.utils.clip_grad_norm_(network.parameters(), self.value)
