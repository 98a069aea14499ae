"""`tensor.data = other`, which moves parameters between host and card in many programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_base: Any = torch._C.TensorBase.data


def _get(tensor: Tensor) -> Tensor:
    data: Tensor = _base.__get__(tensor)
    return data


def _set(tensor: Tensor, value: Tensor) -> None:
    """Give `tensor` the storage of `value`; where they lie on different devices, or only one is fake, exchange it."""
    if isinstance(tensor, FakeTensor) or isinstance(value, FakeTensor):
        if type(tensor) is type(value) and tensor.device == value.device:
            _base.__set__(tensor, value)
        else:
            _exchange(tensor, value)
        for name in ("_vgpu_twin", "_vgpu_pinned"):
            if hasattr(value, name):
                setattr(tensor, name, getattr(value, name))
            elif hasattr(tensor, name):
                delattr(tensor, name)
    else:
        _base.__set__(tensor, value)


def _exchange(tensor: Tensor, value: Tensor) -> None:
    """Swap `tensor` with a tensor of `value`'s storage, all but its gradient, which stays where it lies."""
    wants_grad, grad = tensor.requires_grad, tensor.grad
    made = value.detach()
    torch.utils.swap_tensors(tensor, torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made)
    tensor.requires_grad_(wants_grad)
    if isinstance(grad, FakeTensor):
        place, grad.fake_device = grad.fake_device, tensor.device  # which torch checks
        tensor.grad = grad
        grad.fake_device = place


@contextmanager
def assignable_data() -> Iterator[None]:
    """Let `.data` take tensors from the card and back."""
    Tensor.data = property(_get, _set)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.data  # falls back to TensorBase.data
