"""Values that the card must hold, whatever the data: small integers and masks that were computed without it.

Positions, token ids, padding masks and what is compared of them decide which way a program goes (whether a causal mask
is needed, how long a selection is). Each such tensor on the card has a twin on the CPU, computed by the same operators;
it is lost when something unknown is written into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from bench.vgpu.realness import LIMIT

aten = torch.ops.aten

WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
"""Types whose values are followed."""

_UNSET = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class Twin:
    """The CPU twin of a tensor on the card; views of one storage share `valid`, a list of one truth value."""

    __slots__ = ("tensor", "valid")

    def __init__(self, tensor: Tensor, valid: list[bool]) -> None:
        self.tensor = tensor
        self.valid = valid


def known(value: Any) -> Tensor | None:
    """The values of a tensor: a real one's own, or its twin's; None if nobody knows."""
    if not isinstance(value, FakeTensor):
        return value if isinstance(value, Tensor) and value.device.type == "cpu" else None
    twin: Twin | None = getattr(value, "_vgpu_twin", None)
    return twin.tensor if twin is not None and twin.valid[0] else None


def attach(tensor: Tensor, values: Tensor, valid: list[bool] | None = None) -> None:
    """Remember the values of a tensor on the card."""
    tensor._vgpu_twin = Twin(values, valid if valid is not None else [True])  # type: ignore[attr-defined]


def compute(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`func` on the known values of its arguments; None if one of them is not known."""
    unknown = False

    def to_known(value: Any) -> Any:
        nonlocal unknown
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        values = known(value)
        unknown = unknown or values is None or value.dtype not in WHOLE
        return values

    cpu_args, cpu_kwargs = tree_map(to_known, tuple(args)), tree_map(to_known, dict(kwargs))
    cpu_kwargs.pop("pin_memory", None)
    if unknown:
        return None
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return func(*cpu_args, **cpu_kwargs)


def follow(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
    """Compute the twins of an operator's outputs, or give up the twin of what it has written to."""
    if any(output.dtype not in WHOLE or output.numel() > LIMIT for output in outputs):
        return
    writes = func._schema.is_mutable
    twin: Twin | None = getattr(args[0], "_vgpu_twin", None) if args and isinstance(args[0], FakeTensor) else None
    if writes and twin is None:
        return
    blind = func in _UNSET or torch.Tag.nondeterministic_seeded in func.tags
    values = None if blind else compute(func, args, kwargs)
    if writes:
        if values is None and twin is not None:
            twin.valid[0] = False
        return
    if values is None:
        return
    shared = twin.valid if twin is not None and _is_view(func) else None
    for output, value in zip(outputs, [values] if isinstance(values, Tensor) else values, strict=True):
        if output.device.type == "vgpu" and isinstance(value, Tensor):
            attach(output, value, shared)


def _is_view(func: OpOverload) -> bool:
    alias = func._schema.returns[0].alias_info
    return alias is not None and not alias.is_write
