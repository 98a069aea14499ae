"""Values that the card must hold, whatever the data: small integers, masks and single numbers computed without it.

Positions, token ids, padding masks and what is compared of them decide which way a program goes (whether a causal mask
is needed, how long a selection is); so do loss scales and step counts. Each such tensor on the card has a twin on the
CPU, computed by the same operators; it is lost when something unknown is written into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from bench.vgpu.realness import LIMIT

aten = torch.ops.aten

WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
"""Types whose values are followed; of the others, only single numbers are."""

_UNSET = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

_BY_SHAPE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""Operators that look at the shape of their first argument only."""

# What a truth value must be for the result not to depend on the other operand.
_ABSORBING = {
    aten.logical_or.default: True,
    aten.bitwise_or.Tensor: True,
    aten.logical_and.default: False,
    aten.bitwise_and.Tensor: False,
}


UNKNOWN = object()
"""What `compute` gives where nobody knows."""


class Twin:
    """The CPU twin of a tensor on the card; views of one storage share `valid`, a list of one truth value."""

    __slots__ = ("tensor", "valid")

    def __init__(self, tensor: Tensor, valid: list[bool]) -> None:
        self.tensor = tensor
        self.valid = valid


def known(value: Any) -> Tensor | None:
    """The values of a tensor: a real one's own, or its twin's; None if nobody knows."""
    if not isinstance(value, FakeTensor):
        real = isinstance(value, Tensor) and value.device.type == "cpu" and not hasattr(value, "_vgpu_made_up")
        return value if real else None
    twin: Twin | None = getattr(value, "_vgpu_twin", None)
    return twin.tensor if twin is not None and twin.valid[0] else None


def attach(tensor: Tensor, values: Tensor, valid: list[bool] | None = None) -> None:
    """Remember the values of a tensor on the card."""
    tensor._vgpu_twin = Twin(values, valid if valid is not None else [True])  # type: ignore[attr-defined]


def compute(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`func` on the known values of its arguments; UNKNOWN if one of them is not known."""
    unknown = False

    def to_known(value: Any) -> Any:
        nonlocal unknown
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        values = known(value)
        unknown = unknown or values is None
        return values

    if func in _BY_SHAPE:
        with torch._C._DisableTorchDispatch():
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
    cpu_args, cpu_kwargs = tree_map(to_known, tuple(args)), tree_map(to_known, dict(kwargs))
    cpu_kwargs.pop("pin_memory", None)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        if unknown:
            return _absorbed(func, cpu_args)
        try:
            return func(*cpu_args, **cpu_kwargs)
        except (RuntimeError, IndexError):  # the card raises nothing: it divides by zero, or fails later
            return UNKNOWN


def _absorbed(func: OpOverload, args: Sequence[Any]) -> Any:
    """The result of an `or` with all truth, or an `and` with all untruth, whatever the unknown operand is."""
    answer = _ABSORBING.get(func)
    if answer is None:
        return UNKNOWN
    for values in args:
        if isinstance(values, Tensor) and values.dtype is torch.bool and bool((values == answer).all()):
            return values
    return UNKNOWN


def follow(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
    """Compute the twins of the outputs of an operator that writes to none of its arguments."""
    if func in _UNSET or torch.Tag.nondeterministic_seeded in func.tags:
        return
    values = compute(func, args, kwargs)
    if values is UNKNOWN:
        return
    for output, value in zip(outputs, [values] if isinstance(values, Tensor) else values, strict=False):
        if isinstance(output, FakeTensor) and isinstance(value, Tensor) and followed(output):
            attach(output, value if value.shape == output.shape else value.expand(output.shape).clone())


def follow_view(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
    """Give views of a tensor with a twin the same views of the twin."""
    twin: Twin = args[0]._vgpu_twin
    if not twin.valid[0]:
        return
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        views = func(twin.tensor, *args[1:], **kwargs)
    for output, view in zip(outputs, [views] if isinstance(views, Tensor) else views, strict=True):
        attach(output, view, twin.valid)


def follow_writes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], written: Iterable[Tensor]) -> None:
    """Write to the twins of the arguments that an operator has written to, or give them up.

    A tensor without a twin gets one when known values fill it wholly.
    """
    twins = []
    for tensor in written:
        twin: Twin | None = getattr(tensor, "_vgpu_twin", None)
        if twin is not None and twin.valid[0]:
            twins.append(twin)
        elif _Filled.any:
            tensor.untyped_storage().__dict__.get("_vgpu_valid", [True])[0] = False
    if twins:
        if torch.Tag.nondeterministic_seeded in func.tags or compute(func, args, kwargs) is UNKNOWN:
            for twin in twins:
                twin.valid[0] = False
    elif func in _FILLS:
        _fill(func, args, kwargs)


_FILLS = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}


class _Filled:
    """Whether any tensor has got its twin late, when views of it without one may have been there."""

    any = False


def _fill(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    target = args[0]
    storage = target.untyped_storage()
    if not isinstance(target, FakeTensor) or not followed(target) or not target.is_contiguous():
        return
    if target.numel() * target.itemsize != storage.nbytes():
        return
    with torch._C._DisableTorchDispatch():
        values = torch.empty(target.shape, dtype=target.dtype)
    if compute(func, (values, *args[1:]), kwargs) is not UNKNOWN:
        valid = [True]
        attach(target, values, valid)
        storage._vgpu_valid = valid
        _Filled.any = True


def followed(tensor: Tensor) -> bool:
    """Whether the values of such a tensor are followed."""
    return tensor.numel() == 1 or (tensor.dtype in WHOLE and tensor.numel() <= LIMIT)
