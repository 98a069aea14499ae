"""Random generators of the virtual GPU: `torch.Generator(device="vgpu")`, which in torch asks a C++ backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Base = torch._C.Generator


class _Kind(type(_Base)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Base)


class Generator(_Base, metaclass=_Kind):
    """A generator that keeps its seed; on the card there are no data to draw."""

    _card: torch.device | None

    def __new__(cls, device: Any = "cpu") -> Generator:
        """A generator of the card, or of another device as ever."""
        place = torch.device(device)
        on_card = place.type == "vgpu"
        made = super().__new__(cls, "cpu" if on_card else place)  # type: ignore[call-arg]
        made._card = torch.device("vgpu", place.index or 0) if on_card else None
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its numbers are drawn."""
        return self._card or super().device


@contextmanager
def generators() -> Iterator[None]:
    """Let `torch.Generator` make generators of the card too."""
    torch.Generator = Generator  # type: ignore[misc]
    try:
        yield
    finally:
        torch.Generator = _Base  # type: ignore[misc]
