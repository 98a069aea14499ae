"""What becomes of gradients between steps."""

from __future__ import annotations

from typing import Any, ClassVar

from bench.techniques.base import Fidelity
from bench.techniques.choice import Toggle


class SetToNone(Toggle):
    """`zero_grad(set_to_none=...)`: False keeps zeroed gradients through the next forward, as before PyTorch 2.0."""

    name: ClassVar[str] = "set_to_none"
    off: ClassVar[Any] = True
    fidelity = Fidelity.EXACT
