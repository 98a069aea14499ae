"""Which tensors have data: those on the CPU that are small and never touched the card.

Control planes live there: device meshes, step counters, random indices, tokens. They compute with real values, so that
what hangs on them goes as on a real machine. A large factory on the CPU (the weights of a model before `.to(device)`)
is fake: nobody reads its values, and they may be many GiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LIMIT = 2**16
"""Elements up to which a CPU factory makes a real tensor."""

REAL_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Types of real tensors."""

OWN_TYPES = REAL_TYPES | {FakeTensor}
"""Types that the virtual GPU runs itself; others wrap tensors of these."""


def runs_for_real(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator without fake inputs runs on real tensors."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "vgpu":
        return False
    if kwargs.get("pin_memory"):
        return False
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if tensors:
        return all(tensor.device.type != "vgpu" for tensor in tensors)
    if any(isinstance(value, list | tuple) and value and isinstance(value[0], Tensor) for value in args):
        return True
    return (device is not None and torch.device(device).type == "meta") or _elements(args) <= LIMIT


def _elements(args: Sequence[Any]) -> int:
    """Elements of what a factory makes, from its size argument; numbers alone are the bounds of an arange."""
    for value in args:
        if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
            return math.prod(value)
    numbers = [abs(value) for value in args if isinstance(value, int | float)]
    return int(max(numbers, default=0))
