"""The layout of what a convolution makes: channels last where its input or its weight lies so, as cuDNN gives it.

aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format, torch 2.13. torch's own shape rule knows the layouts
of CUDA's convolutions on CUDA tensors only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


def install() -> None:
    """Put the layout rule around torch's shape rules."""
    for func, position in ((aten.convolution.default, 0), (aten.convolution_backward.default, 1)):
        op_implementations_dict[func] = _laid_out(op_implementations_dict[func], position)


def _laid_out(rule: Any, position: int) -> Any:
    """`rule`, its results in the layout that the input, the argument at `position`, and the weight ask for."""

    def laid_out(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        results = rule(mode, func, *args, **kwargs)
        source, weight = args[position : position + 2]
        layout = _layout(source, weight)
        if source.device.type != "vgpu" or layout is torch.contiguous_format:
            return results
        if isinstance(results, Tensor):
            return torch.empty_like(results, memory_format=layout)
        *made, bias = results
        return (*(each if each is None else torch.empty_like(each, memory_format=layout) for each in made), bias)

    return laid_out


def _layout(source: Tensor, weight: Tensor) -> torch.memory_format:
    if torch.float64 in (source.dtype, weight.dtype) or weight.dim() < 4:
        return torch.contiguous_format
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    return last if last in (suggest_memory_format(source), suggest_memory_format(weight)) else torch.contiguous_format
