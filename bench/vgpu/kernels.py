"""How long an operator's kernel runs: the larger of its arithmetic and its traffic.

FLOPs come from torch's own counters (torch/utils/flop_counter.py, torch 2.13); rates from the target table. Traffic is
every input read once and every output written once, except where an operator reads only what it picks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from bench.vgpu.clock import Bound
from bench.vgpu.targets import Target

aten = torch.ops.aten

LAUNCH_S = 5e-6
"""Host seconds of an operator that launches a kernel."""

VIEW_S = 1e-6
"""Host seconds of an operator that makes a view."""

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
    """Bytes of the elements of `tensors`."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


class Kernels:
    """Durations of operators on one target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._flops: dict[Any, int] = {}

    def duration(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> tuple[float, Bound]:
        """Seconds of the operator's kernel, and what bounds it."""
        traffic_s = self._traffic_bytes(func, inputs, outputs) / self._target.bandwidth_bytes_s
        packet = func._overloadpacket
        if packet not in flop_registry:
            return traffic_s, Bound.BANDWIDTH
        compute_s = self._count(packet, args, kwargs, inputs, outputs) / self._rate(inputs[0].dtype)
        return (compute_s, Bound.COMPUTE) if compute_s > traffic_s else (traffic_s, Bound.BANDWIDTH)

    def _traffic_bytes(self, func: OpOverload, inputs: list[Tensor], outputs: list[Tensor]) -> int:
        written = total_bytes(outputs)
        if func in _PICKS:
            return 2 * written + total_bytes(inputs[1:])
        if func in _FILLS:
            return written + total_bytes(inputs[1:])
        return written + total_bytes(inputs)

    def _count(
        self, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> int:
        key = (packet, tuple(tensor.shape for tensor in inputs), kwargs.get("is_causal"))
        count = self._flops.get(key)
        if count is None:
            out = outputs[0] if len(outputs) == 1 else tuple(outputs)
            count = self._flops[key] = int(flop_registry[packet](*args, **kwargs, out_val=out))
        return count

    def _rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of matrix products in `dtype`; float32 takes tensor cores only if PyTorch is told to allow TF32."""
        rates = self._target.matmul_flops_s
        kind = _KINDS.get(dtype, "fp32")
        if kind == "fp32" and torch.backends.cuda.matmul.allow_tf32:
            kind = "tf32"
        return rates.get(kind, rates["fp32"])
