"""The dispatch mode: runs every operator on fake tensors and charges the device for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from bench.vgpu import stand_ins
from bench.vgpu.allocator import OutOfMemory
from bench.vgpu.clock import Bound
from bench.vgpu.collectives import COLLECTIVES, collective_s
from bench.vgpu.device import Device
from bench.vgpu.distributed import follow_collective
from bench.vgpu.handlers import HANDLERS, KEEPS_VALUES, NO_DATA, PINNING, by_values
from bench.vgpu.inplace import CANDIDATES, as_on_card
from bench.vgpu.kernels import Kernels, tensors_in, total_bytes
from bench.vgpu.known import UNKNOWN, attach, follow, follow_view, follow_writes, followed
from bench.vgpu.oom import out_of_memory_error
from bench.vgpu.realness import OWN_TYPES, REAL_TYPES, runs_for_real
from bench.vgpu.shape_cache import ShapeCachedMode
from bench.vgpu.temporaries import TEMPORARIES, UNPRICED, Call
from bench.vgpu.workspaces import CUBLAS_OPERATORS, cublas_workspace_bytes

aten = torch.ops.aten
_device_of = torch.ops.prim.device.default


class _Rule:
    """What is known of an operator before it runs."""

    __slots__ = ("collective", "cublas", "makes", "resizes", "temporaries", "unpriced", "view", "writes")

    def __init__(self, func: OpOverload) -> None:
        returns = func._schema.returns
        aliases = [item.alias_info for item in returns]
        self.view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        self.makes = any(alias is None for alias in aliases)
        self.cublas = func in CUBLAS_OPERATORS
        self.temporaries = TEMPORARIES.get(func)
        self.unpriced = func in UNPRICED
        self.writes = [
            (index, argument.name)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        out = any(argument.is_out for argument in func._schema.arguments)
        self.collective = func.namespace == "c10d"
        self.resizes = out or func in (aten.resize_.default, aten.resize_as_.default)

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors that the operator has written to."""
        return tensors_in([args[index] if index < len(args) else kwargs.get(name) for index, name in self.writes])


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


class VirtualMode(ShapeCachedMode):
    """Fake tensors, with an account of what each operator costs the device.

    Only what touches the card is fake: small tensors on the CPU that never did stay real (see `realness`).
    It is a FakeTensorMode itself and not a mode above it: one dispatch per operator, and DTensors, which FakeTensorMode
    declines, come back as operators on their local tensors.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self._kernels = Kernels(device.target)
        self._rules: dict[OpOverload, _Rule] = {}
        self._workspace_bytes = cublas_workspace_bytes(
            device.target.capability, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), device.release
        )
        self._inside = False
        self.uncharged = _Uncharged(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: the dispatcher calls `__torch_dispatch__` itself, with no wrapper around each operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _device_of and isinstance(args[0], FakeTensor) and not self.in_kernel_invocation:
            return args[0].fake_device
        # Subclasses that are not ours (DTensor) come back as operators on the tensors inside them.
        if self._inside or not isinstance(func, OpOverload) or not OWN_TYPES.issuperset(types):
            return self.dispatch(func, types, args, kwargs)
        if REAL_TYPES.issuperset(types) and func not in PINNING and runs_for_real(args, kwargs):
            self.device.clock.host_work(self.device.target.view_s)
            return func(*args, **kwargs)
        self._inside = True
        try:
            if func in CANDIDATES:
                func = as_on_card(func, args, self.device.adds_in_place)
            handler = HANDLERS.get(func)
            if handler is not None:
                result = handler(self, func, types, args, kwargs)
            else:
                try:
                    result = self.dispatch(func, types, args, kwargs)
                except NO_DATA:
                    result = by_values(self, func, args, kwargs)
                    if result is UNKNOWN:
                        raise
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
        return self.dispatch(func, types, args, kwargs)

    def _charge(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = _Rule(func)
        if self.device.attribution is not None:
            self.device.attribution.passed()
        if rule.view:
            self.device.clock.host_s += self.device.target.view_s
            if func is aten.lift_fresh.default:
                self._charge_lifted(func, args[0], result)
            elif getattr(args[0], "_vgpu_twin", None) is not None:
                follow_view(func, args, kwargs, [result] if isinstance(result, Tensor) else tensors_in(result))
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
        if rule.resizes:
            self._charge_resized(func, outputs)
        if rule.collective:
            follow_collective(self, func, args)
        elif rule.writes:
            if func not in KEEPS_VALUES:
                follow_writes(func, args, kwargs, rule.written(args, kwargs))
        elif outputs and followed(outputs[0]):
            follow(func, args, kwargs, outputs)
        self._charge_hidden(func, rule, args, kwargs)
        self._charge_time(func, args, kwargs, inputs, outputs or rule.written(args, kwargs))
        if func is aten._local_scalar_dense.default:
            self.device.clock.synchronize(self.device.stream)

    def _charge_outputs(self, func: OpOverload, outputs: list[Tensor]) -> None:
        memory = self.device.memory
        for tensor in outputs:
            if tensor.device.type == "vgpu":
                storage = tensor.untyped_storage()
                if not memory.holds(storage._cdata):
                    self._guarded(func, memory.take, storage, self.device.stream)

    def _charge_resized(self, func: OpOverload, outputs: list[Tensor]) -> None:
        """Results written to tensors that were given, and made larger if too small."""
        memory = self.device.memory
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if memory.holds(storage._cdata):
                self._guarded(func, memory.resize, storage, self.device.stream)

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
        self.device.memory.operator = func
        try:
            take(*args)
        except OutOfMemory as error:
            failure = error
        else:
            return
        # Raised out here, the error has no context whose frames would keep memory.
        raise out_of_memory_error(failure.with_traceback(None), self.device, str(func), sys._getframe(1))

    def _charge_host(self, inputs: list[Tensor], outputs: list[Tensor], kwargs: Mapping[str, Any]) -> None:
        """An operator on the CPU: launch and traffic, both on the host's clock."""
        if kwargs.get("pin_memory"):
            for tensor in outputs:
                stand_ins.set_pinned(tensor)
        moved = total_bytes(inputs) + total_bytes(outputs)
        self.device.clock.host_work(self.device.target.view_s + moved / self.device.target.host_bandwidth_bytes_s)

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
        device.clock.launch(device.stream, seconds, bound, self._kernels.launch_s(func))

    def _charge_transfer(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """A copy between host and card; the host waits for it unless it is non-blocking to or from pinned memory."""
        device = self.device
        seconds = total_bytes(outputs) / device.target.pcie_bytes_s
        device.clock.launch(device.stream, seconds, Bound.TRANSFER, device.target.launch_s)
        asked = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2] is True)
        on_host = [tensor for tensor in (*inputs, *outputs) if tensor.device.type == "cpu"]
        if not (asked and all(stand_ins.is_pinned(tensor) for tensor in on_host)):
            device.clock.synchronize(device.stream)


_COPIES = {aten._to_copy.default, aten.copy_.default}
