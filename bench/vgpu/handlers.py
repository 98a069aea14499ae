"""Operators that ask for data: the answer where the values are known, a stand-in where they are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._pytree import tree_map_only

from bench.vgpu import distributed, stand_ins
from bench.vgpu.kernels import tensors_in
from bench.vgpu.known import UNKNOWN, attach, compute, known

if TYPE_CHECKING:
    from bench.vgpu.mode import VirtualMode

aten = torch.ops.aten

Handler = Callable[["VirtualMode", OpOverload, Any, Sequence[Any], Mapping[str, Any]], Any]

PINNING = {aten._pin_memory.default, aten.is_pinned.default}
"""Operators on page-locked memory, which real tensors have only here."""

NO_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""What FakeTensorMode raises where data decide."""


def by_values(mode: VirtualMode, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator whose output the data decide, computed from known values; or UNKNOWN."""
    wait_for(mode, args)
    values = compute(func, args, kwargs)
    if not isinstance(values, Tensor | tuple | list):
        return values
    device = next(tensor.device for tensor in tensors_in(args))
    with mode:
        return tree_map_only(Tensor, lambda value: _on_card(value, device), values)


def _on_card(values: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=device)
    attach(tensor, values)
    return tensor


def wait_for(mode: VirtualMode, args: Sequence[Any]) -> None:
    """Make the host wait for the current stream, as it does to read what is on the card."""
    if any(tensor.device.type == "vgpu" for tensor in tensors_in(args)):
        mode.device.clock.synchronize(mode.device.stream)


def _scalar(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`.item()`: the value where it is known, a stand-in where not; either way the host waits."""
    tensor = args[0]
    wait_for(mode, args)
    if (values := known(tensor)) is not None:
        return values.item()
    try:
        return mode.plain(func, types, args, kwargs)
    except DataDependentOutputException:
        return stand_ins.scalar(mode.device, tensor, func)


def _equal(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """`torch.equal` and `torch.allclose`: true of tensors whose values nobody knows."""
    wait_for(mode, args)
    if func is aten.equal.default and args[0].shape != args[1].shape:
        return False
    values = compute(func, args, kwargs)
    return stand_ins.truth(mode.device, func, True) if values is UNKNOWN else bool(values)


def _longest(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Operators whose output is as long as the data say: so long where they are known, else the longest it can be."""
    result = by_values(mode, func, args, kwargs)
    if result is not UNKNOWN:
        return result
    mode.device.stand_ins[str(func)] += 1
    with mode:
        return stand_ins.longest(func, args, kwargs)


def _masked_select(
    mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """As many elements as the mask selects, where it is known, whatever they are."""
    tensor, mask = args
    values = known(mask)
    if values is None:
        return _longest(mode, func, types, args, kwargs)
    wait_for(mode, args)
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    with torch._C._DisableTorchDispatch():
        count = int(values.expand(shape).count_nonzero())
    with mode:
        return tensor.new_empty((count,))


def _index(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Indexing; a mask picks as many elements as it has."""
    if any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        wait_for(mode, args)
        with mode:
            args = (args[0], stand_ins.spread_masks(mode.device, args[1]), *args[2:])
    return mode.plain(func, types, args, kwargs)


def _packed(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`pack_padded_sequence`: lengths are on the CPU, and known as a rule."""
    source, lengths, batch_first = args
    values = known(lengths)
    if values is None:
        mode.device.stand_ins[str(func)] += 1
        steps = [source.size(1 if batch_first else 0)] * lengths.numel()
    else:
        steps = values.tolist()
    sizes = torch.tensor([sum(step > at for step in steps) for at in range(max(steps))], device="cpu")
    with mode:
        return source.new_empty((sum(steps), *source.shape[2:])), sizes


def _pin(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    if not isinstance(source, FakeTensor):
        with torch._C._DisableTorchDispatch():
            pinned = source.clone()
    else:
        with mode:
            pinned = torch.empty_like(source, device="cpu")
    stand_ins.set_pinned(pinned)
    return pinned


def _pinned(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return stand_ins.is_pinned(args[0])


def _to_copy(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A copy; what is known of the card becomes a real tensor on the CPU.

    A non-blocking copy from the card to the host lands in pinned memory, so that nothing waits for it (`pin_out` in
    `_to_copy`, ATen/native/TensorConversions.cpp).
    """
    source = args[0]
    device = kwargs.get("device")
    if source.device.type != "vgpu" or device is None or torch.device(device).type != "cpu":
        return mode.plain(func, types, args, kwargs)
    if isinstance(source, FakeTensor) and known(source) is not None:
        copied = compute(func, args, kwargs)
    else:
        copied = mode.plain(func, types, args, kwargs)
    if kwargs.get("non_blocking") and isinstance(copied, Tensor):
        stand_ins.set_pinned(copied)
    return copied


def _copy(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A copy in place; into a real tensor it brings the known values, or stand-in zeros."""
    target, source = args[:2]
    if isinstance(target, FakeTensor) or target.device.type == "vgpu":
        return mode.plain(func, types, args, kwargs)
    values = known(source)
    with torch._C._DisableTorchDispatch():
        if values is not None:
            return target.copy_(values)
        stand_ins.made_up(mode.device, func, target)
        return target.zero_()


def _finite(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """GradScaler's look for infinite gradients: the stand-in is that there are none, as in nearly every step."""
    mode.device.stand_ins[str(func)] += 1
    mode.plain(func, types, args, kwargs)


def _record(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    mode.device.memory.record_stream(args[0].untyped_storage(), args[1].stream_id)


HANDLERS: dict[OpOverload, Handler] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _equal,
    aten.allclose.default: _equal,
    aten.nonzero.default: _longest,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _longest,
    aten.unique_dim.default: _longest,
    aten.unique_consecutive.default: _longest,
    aten.bincount.default: _longest,
    aten.repeat_interleave.Tensor: _longest,
    aten._pack_padded_sequence.default: _packed,
    aten.index.Tensor: _index,
    aten.index_put_.default: _index,
    aten.index_put.default: _index,
    aten._pin_memory.default: _pin,
    aten.is_pinned.default: _pinned,
    aten.record_stream.default: _record,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _finite,
    torch.ops.c10d.allreduce_.default: distributed.all_reduce,
}

KEEPS_VALUES = frozenset({aten._amp_foreach_non_finite_check_and_unscale_.default})
"""Operators that write, but not to what is known of their arguments."""
