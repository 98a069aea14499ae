"""Answers that only data could give, made up in a stated way and counted.

A number is 0, a truth value is False; a line that keeps asking (a loop that ends on data) is answered the other way
after `PATIENCE` times. A length that the data decide is the longest possible; where there is no bound, as if each value
were the least: `bincount` finds zeros, `repeat_interleave` repeats once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from bench.vgpu.device import Device, current
from bench.vgpu.known import known

aten = torch.ops.aten

PATIENCE = 1000

_asked: Counter[tuple[str, int]] = Counter()


def scalar(device: Device, tensor: Tensor, func: OpOverload) -> bool | int | float:
    """The stand-in for `.item()` on `tensor`."""
    answer = truth(device, func, False)
    if tensor.dtype is torch.bool:
        return answer
    return float(answer) if tensor.is_floating_point() else int(answer)


def truth(device: Device, func: OpOverload, usual: bool) -> bool:
    """`usual`, or its opposite if the line that asks has been told so for too long.

    torch.distributions asks only whether its arguments are valid; they are.
    """
    device.stand_ins[f"{func}"] += 1
    frame = _asking_frame(sys._getframe(1))
    if frame.f_globals.get("__name__", "").startswith("torch.distributions"):
        return True
    place = (frame.f_code.co_filename, frame.f_lineno)
    _asked[place] += 1
    return usual != ((_asked[place] // PATIENCE) % 2 == 1)


def made_up(device: Device, func: OpOverload, tensor: Tensor) -> None:
    """Note that a real tensor gets values that nobody knows; `save_on_cpu` puts them away without a look at them."""
    tensor._vgpu_made_up = True  # type: ignore[attr-defined]
    if _asking_frame(sys._getframe(1)).f_globals.get("__name__") != "torch.autograd.graph":
        device.stand_ins[f"{func}"] += 1


def _asking_frame(frame: FrameType) -> FrameType:
    """The innermost frame outside this package and torch's dispatch."""
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("bench.vgpu", "torch._", "torch.utils")):
            break
        frame = frame.f_back
    return frame


def longest(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The largest output that `func` can have: every element nonzero, selected, unique."""
    tensor = args[0]
    if func is aten.nonzero.default:
        return torch.empty((tensor.numel(), tensor.dim()), dtype=torch.int64, device=tensor.device)
    if func is aten.masked_select.default:
        shape = torch.broadcast_shapes(tensor.shape, args[1].shape)
        return tensor.new_empty((shape.numel(),))
    if func is aten.bincount.default:
        length = max(kwargs.get("minlength", args[2] if len(args) > 2 else 0), 1)
        weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
        return tensor.new_empty((length,), dtype=torch.int64 if weights is None else torch.float64)
    if func is aten.repeat_interleave.Tensor:
        return torch.empty((kwargs.get("output_size") or tensor.numel(),), dtype=torch.int64, device=tensor.device)
    if func is aten.unique_consecutive.default:
        dim = kwargs.get("dim", args[3] if len(args) > 3 else None)
    else:
        dim = args[1] if func is aten.unique_dim.default else None
    count = tensor.numel() if dim is None else tensor.size(dim)
    values = tensor.new_empty((count,)) if dim is None else torch.empty_like(tensor)
    inverse = torch.empty(tensor.shape if dim is None else (count,), dtype=torch.int64, device=tensor.device)
    return values, inverse, torch.empty((count,), dtype=torch.int64, device=tensor.device)


def spread_masks(device: Device, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Index tensors in place of masks, one for every dimension; as long as a mask selects, or at most can."""
    spread: list[Tensor | None] = []
    for index in indices:
        if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8):
            spread.append(index)
            continue
        values = known(index)
        if values is None:
            device.stand_ins["mask as an index"] += 1
        with torch._C._DisableTorchDispatch():
            count = index.numel() if values is None else int(values.count_nonzero())
        spread += [torch.empty((count,), dtype=torch.int64, device=index.device) for _ in range(index.dim())]
    return spread


def set_pinned(tensor: Tensor) -> None:
    """Remember that a fake CPU tensor lies in page-locked memory."""
    tensor._vgpu_pinned = True  # type: ignore[attr-defined]


def is_pinned(tensor: Tensor) -> bool:
    """Whether the tensor, or the one it is a view of, lies in page-locked memory."""
    base = tensor._base if tensor._base is not None else tensor
    return bool(getattr(tensor, "_vgpu_pinned", False) or getattr(base, "_vgpu_pinned", False))


def _nested(shape: Sequence[int], value: Any) -> Any:
    return [_nested(shape[1:], value) for _ in range(shape[0])] if shape else value


def _tolist(tensor: FakeTensor) -> Any:
    """`.tolist()`: zeros in the tensor's shape; a known constant as it is."""
    device = current()
    device.clock.synchronize(device.stream)
    if (values := known(tensor)) is not None:
        return values.tolist()
    device.stand_ins["Tensor.tolist"] += 1
    zero: Any = False if tensor.dtype is torch.bool else 0.0 if tensor.is_floating_point() else 0
    return _nested(tuple(tensor.shape), zero)


def _numpy(tensor: FakeTensor, *, force: bool = False) -> Any:
    """`.numpy()`: zeros in the tensor's shape; a known constant as it is.

    Raises:
        TypeError: The tensor is on the card; PyTorch's own words.
    """
    if tensor.device.type != "cpu" and not force:
        raise TypeError(
            f"can't convert {tensor.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    if (values := known(tensor)) is not None:
        return values.numpy(force=force)
    current().stand_ins["Tensor.numpy"] += 1
    with torch._C._DisableTorchDispatch():
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype).numpy()


@contextmanager
def answering() -> Iterator[None]:
    """Let fake tensors answer `.tolist()` and `.numpy()`."""
    tolist = FakeTensor.tolist
    FakeTensor.tolist = _tolist  # type: ignore[method-assign, assignment]
    FakeTensor.numpy = _numpy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensor.tolist = tolist  # type: ignore[method-assign]
        del FakeTensor.numpy
        _asked.clear()
