"""The dispatch mode: runs every operator on fake tensors and charges the device for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from bench.vgpu import stand_ins
from bench.vgpu.allocator import OutOfMemory
from bench.vgpu.clock import Bound
from bench.vgpu.collectives import COLLECTIVES, collective_s
from bench.vgpu.device import Device
from bench.vgpu.kernels import LAUNCH_S, VIEW_S, Kernels, tensors_in, total_bytes
from bench.vgpu.known import WHOLE, attach, compute, follow, known
from bench.vgpu.oom import out_of_memory_error
from bench.vgpu.realness import runs_for_real
from bench.vgpu.temporaries import TEMPORARIES, UNPRICED, Call
from bench.vgpu.workspaces import CUBLAS_OPERATORS, cublas_workspace_bytes

aten = torch.ops.aten
_device_of = torch.ops.prim.device.default


class _Rule:
    """What is known of an operator before it runs."""

    __slots__ = ("cublas", "makes", "temporaries", "unpriced", "view")

    def __init__(self, func: OpOverload) -> None:
        returns = func._schema.returns
        aliases = [item.alias_info for item in returns]
        self.view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        self.makes = any(alias is None for alias in aliases)
        self.cublas = func in CUBLAS_OPERATORS
        self.temporaries = TEMPORARIES.get(func)
        self.unpriced = func in UNPRICED


class _Uncharged:
    """A context, to be entered again and again, in which operators run and cost nothing."""

    def __init__(self, mode: VirtualMode) -> None:
        self._mode = mode
        self._outer: list[bool] = []

    def __enter__(self) -> None:
        self._outer.append(self._mode._inside)
        self._mode._inside = True

    def __exit__(self, *exc: object) -> None:
        self._mode._inside = self._outer.pop()


class VirtualMode(FakeTensorMode):
    """Fake tensors, with an account of what each operator costs the device.

    Only what touches the card is fake: small tensors on the CPU that never did stay real (see `realness`).
    It is FakeTensorMode itself and not a mode above it: one dispatch per operator, and DTensors, which FakeTensorMode
    declines, come back as operators on their local tensors.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device
        self._kernels = Kernels(device.target)
        self._rules: dict[OpOverload, _Rule] = {}
        self._workspace_bytes = cublas_workspace_bytes(
            device.target.capability, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), device.release
        )
        self._inside = False
        self.uncharged = _Uncharged(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _device_of and isinstance(args[0], FakeTensor) and not self.in_kernel_invocation:
            return args[0].fake_device
        if self._inside or not isinstance(func, OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if not types and func not in _PINNING and runs_for_real(args, kwargs):
            self.device.clock.host_work(LAUNCH_S)
            return func(*args, **kwargs)
        self._inside = True
        try:
            handler = _HANDLERS.get(func)
            if handler is not None:
                result = handler(self, func, types, args, kwargs)
            else:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            if result is not NotImplemented:
                self._charge(func, args, kwargs, result)
        finally:
            self._inside = False
        return result

    def may_turn_const(self, t: Tensor) -> bool:
        """Constants are kept on the CPU only: real kernels compute with them, and the card has none."""
        return t.device.type != "vgpu" and super().may_turn_const(t)

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualMode:
        return self

    def plain(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator as FakeTensorMode runs it."""
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _charge(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = _Rule(func)
        if rule.view:
            self.device.clock.host_s += VIEW_S
            if func is aten.lift_fresh.default:
                self._charge_lifted(func, args[0], result)
            elif getattr(args[0], "_vgpu_twin", None) is not None:
                follow(func, args, kwargs, [result] if isinstance(result, Tensor) else tensors_in(result))
            return
        outputs = (
            [result] if isinstance(result, Tensor) else tensors_in(result if isinstance(result, tuple | list) else ())
        )
        inputs = tensors_in(args)
        on_card = any(getattr(tensor, "fake_device", tensor.device).type == "vgpu" for tensor in (*outputs, *inputs))
        if not on_card:
            self._charge_host(inputs, outputs, kwargs)
            return
        if rule.makes:
            self._charge_outputs(func, outputs)
        if outputs and outputs[0].dtype in WHOLE:
            follow(func, args, kwargs, outputs)
        self._charge_hidden(func, rule, args, kwargs)
        self._charge_time(func, args, kwargs, inputs, outputs)

    def _charge_outputs(self, func: OpOverload, outputs: list[Tensor]) -> None:
        memory = self.device.memory
        for tensor in outputs:
            if tensor.device.type == "vgpu":
                storage = tensor.untyped_storage()
                if not memory.holds(storage._cdata):
                    self._guarded(func, memory.take, storage, self.device.stream)

    def _charge_lifted(self, func: OpOverload, source: Tensor, result: Tensor) -> None:
        """`torch.tensor(..., device=)`, built below the modes, comes up here with its values."""
        self._charge_outputs(func, [result])
        values = getattr(source, "_vgpu_values", None)
        if values is not None and result.dtype == values.dtype:
            attach(result, values)

    def _charge_hidden(self, func: OpOverload, rule: _Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        memory, stream = self.device.memory, self.device.stream
        if rule.cublas and self._workspace_bytes:
            self._guarded(func, memory.workspace, self._workspace_bytes, stream)
        if rule.temporaries is not None:
            for sizes in rule.temporaries(Call(args, kwargs, self.device.target, self.device.release)):
                self._guarded(func, memory.pass_through, sizes, stream)
        if rule.unpriced:
            self.device.unpriced[str(func)] += 1

    def _guarded(self, func: OpOverload, take: Callable[..., None], *args: Any) -> None:
        try:
            take(*args)
        except OutOfMemory as failure:
            raise out_of_memory_error(failure, self.device, str(func), sys._getframe(1)) from None

    def _charge_host(self, inputs: list[Tensor], outputs: list[Tensor], kwargs: Mapping[str, Any]) -> None:
        """An operator on the CPU: launch and traffic, both on the host's clock."""
        if kwargs.get("pin_memory"):
            for tensor in outputs:
                stand_ins.set_pinned(tensor)
        moved = total_bytes(inputs) + total_bytes(outputs)
        self.device.clock.host_work(LAUNCH_S + moved / self.device.target.host_bandwidth_bytes_s)

    def _charge_time(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        device = self.device
        if func in COLLECTIVES:
            seconds, bound = collective_s(func, args, device.target), Bound.COLLECTIVE
        elif func in _COPIES and {tensor.device.type for tensor in (*inputs, *outputs)} != {"vgpu"}:
            self._charge_transfer(args, kwargs, inputs, outputs)
            return
        else:
            seconds, bound = self._kernels.duration(func, args, kwargs, inputs, outputs)
        device.clock.launch(device.stream, seconds, bound, LAUNCH_S)

    def _charge_transfer(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """A copy between host and card; the host waits for it unless it is non-blocking to or from pinned memory."""
        device = self.device
        seconds = total_bytes(outputs) / device.target.pcie_bytes_s
        device.clock.launch(device.stream, seconds, Bound.TRANSFER, LAUNCH_S)
        asked = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2] is True)
        on_host = [tensor for tensor in (*inputs, *outputs) if tensor.device.type == "cpu"]
        if not (asked and all(stand_ins.is_pinned(tensor) for tensor in on_host)):
            device.clock.synchronize(device.stream)


_PINNING = {aten._pin_memory.default, aten.is_pinned.default}
_COPIES = {aten._to_copy.default, aten.copy_.default}

Handler = Callable[[VirtualMode, OpOverload, Any, Sequence[Any], Mapping[str, Any]], Any]


def _scalar(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`.item()`: the value where it is a known constant, a stand-in where not; either way the host waits."""
    tensor = args[0]
    if tensor.device.type == "vgpu":
        mode.device.clock.synchronize(mode.device.stream)
    if (values := known(tensor)) is not None:
        return values.item()
    try:
        return mode.plain(func, types, args, kwargs)
    except DataDependentOutputException:
        return stand_ins.scalar(mode.device, tensor, func)


def _true(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    mode.device.stand_ins[str(func)] += 1
    return True


def _longest(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Operators whose output is as long as the data say: so long where they are known, else the longest it can be."""
    mode.device.clock.synchronize(mode.device.stream)
    values = compute(func, args, kwargs)
    if values is not None:
        with mode:
            return tree_map_only(Tensor, lambda value: _on_card(value, args[0].device), values)
    mode.device.stand_ins[str(func)] += 1
    with mode:
        return stand_ins.longest(func, args, kwargs)


def _on_card(values: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=device)
    attach(tensor, values)
    return tensor


def _index(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Indexing; a mask picks as many elements as it has."""
    if any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        mode.device.clock.synchronize(mode.device.stream)
        with mode:
            args = (args[0], stand_ins.spread_masks(mode.device, args[1]), *args[2:])
    return mode.plain(func, types, args, kwargs)


def _pin(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with mode:
        pinned = torch.empty_like(args[0], device="cpu")
    stand_ins.set_pinned(pinned)
    return pinned


def _pinned(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return stand_ins.is_pinned(args[0])


def _copy_to_real(
    mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A copy; into a real tensor it brings stand-in zeros, as what is on the card has no data."""
    target = args[0]
    if isinstance(target, FakeTensor) or target.device.type == "vgpu":
        return mode.plain(func, types, args, kwargs)
    mode.device.stand_ins[str(func)] += 1
    return target.zero_()


def _record(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    mode.device.memory.record_stream(args[0].untyped_storage(), args[1].stream_id)


_HANDLERS: dict[OpOverload, Handler] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _true,
    aten.nonzero.default: _longest,
    aten.masked_select.default: _longest,
    aten._unique2.default: _longest,
    aten.unique_dim.default: _longest,
    aten.unique_consecutive.default: _longest,
    aten.index.Tensor: _index,
    aten.index_put_.default: _index,
    aten.index_put.default: _index,
    aten._pin_memory.default: _pin,
    aten.is_pinned.default: _pinned,
    aten.record_stream.default: _record,
    aten.copy_.default: _copy_to_real,
}
