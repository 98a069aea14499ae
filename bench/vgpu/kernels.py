"""How long an operator's kernel runs, the larger of its arithmetic and its traffic, and what its launch costs the host.

FLOPs come from torch's own counters (torch/utils/flop_counter.py, torch 2.13); rates from the target table. Traffic is
every input read once and every output written once, except where an operator touches only what it picks. What is
expanded is read as often as it has distinct elements, and what comes twice is read once: caches see to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from bench.targets import Target
from bench.vgpu.clock import Bound

aten = torch.ops.aten

# Operators that make a tensor and launch nothing; one whose schema does not say that it is a view.
_NO_KERNEL = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
}
# Operators that read as many elements of their first tensor as they put out, not all of it.
_PICKS = {
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}
# Operators that write their first tensor without reading it.
_FILLS = {
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
    aten.normal_.default,
    aten.uniform_.default,
    aten.random_.to,
    aten.bernoulli_.float,
    aten.exponential_.default,
}
# Operators that read and write those elements of their first tensor that another one goes to, and whether they copy it.
_SCATTERS = {
    aten.scatter_.src: False,
    aten.scatter_.value: False,
    aten.scatter_add_.default: False,
    aten.index_add_.default: False,
    aten.index_put_.default: False,
    aten._index_put_impl_.default: False,
    aten.scatter.src: True,
    aten.scatter.value: True,
    aten.scatter_add.default: True,
    aten.index_add.default: True,
    aten.index_put.default: True,
}

_CUDNN = {
    aten.convolution,
    aten._convolution,
    aten.convolution_backward,
    aten._cudnn_rnn,
    aten._cudnn_rnn_backward,
}

_KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among `values`, one level of lists and tuples deep."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct elements of `tensors`."""
    return sum(_distinct_bytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _distinct_bytes(tensor: Tensor) -> int:
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.dtype.itemsize
    sizes = (size for size, stride in zip(tensor.shape, strides, strict=True) if stride)
    return prod(sizes) * tensor.dtype.itemsize if tensor.numel() else 0


class Kernels:
    """Durations of operators on one target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._flops: dict[Any, int] = {}

    def launch_s(self, func: OpOverload) -> float:
        """Seconds that the host is busy with an operator on the card."""
        return self._target.view_s if func in _NO_KERNEL else self._target.launch_s

    def duration(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> tuple[float, Bound]:
        """Seconds of the operator's kernel, and what bounds it.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: Its named arguments.
            inputs: The tensors among its arguments.
            outputs: What it wrote: new tensors or old ones.
        """
        if func in _NO_KERNEL:
            return 0.0, Bound.BANDWIDTH
        traffic_s = self._traffic_bytes(func, inputs, outputs) / self._target.attained_bytes_s
        packet = func._overloadpacket
        if packet not in flop_registry:
            return traffic_s, Bound.BANDWIDTH
        compute_s = self._count(packet, args, kwargs, inputs, outputs) / self._rate(packet, inputs[0].dtype)
        return (compute_s, Bound.COMPUTE) if compute_s > traffic_s else (traffic_s, Bound.BANDWIDTH)

    def _traffic_bytes(self, func: OpOverload, inputs: list[Tensor], outputs: list[Tensor]) -> int:
        written = total_bytes(outputs)
        if func in _PICKS:
            return 2 * written + total_bytes(inputs[1:])
        if func in _FILLS:
            return written + total_bytes(inputs[1:])
        if func in _SCATTERS:
            touched = min(written, inputs[-1].numel() * outputs[0].dtype.itemsize)
            return total_bytes(inputs[1:]) + 2 * touched + 2 * written * _SCATTERS[func]
        return written + total_bytes(inputs)

    def _count(
        self, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> int:
        mask = tuple(args[10]) if packet is aten.convolution_backward else None
        key = (packet, tuple(tensor.shape for tensor in inputs), kwargs.get("is_causal"), mask)
        count = self._flops.get(key)
        if count is None:
            out: Any = outputs[0] if len(outputs) == 1 else tuple(outputs)
            if mask is not None:  # gradients that nobody wants are not among the outputs
                wanted = iter(outputs)
                out = tuple(next(wanted) if wants else None for wants in mask)
            count = self._flops[key] = int(flop_registry[packet](*args, **kwargs, out_val=out))
        return count

    def _rate(self, packet: Any, dtype: torch.dtype) -> float:
        """FLOP/s in `dtype`; float32 takes tensor cores where PyTorch allows TF32, by default in cuDNN alone."""
        rates = self._target.matmul_flops_s
        kind = _KINDS.get(dtype, "fp32")
        backend = torch.backends.cudnn if packet in _CUDNN else torch.backends.cuda.matmul
        if kind == "fp32" and backend.allow_tf32:
            kind = "tf32"
        return rates.get(kind, rates["fp32"])
