"""Grouped matrix products, one for each expert of a mixture: shapes and arithmetic as on CUDA.

aten/src/ATen/native/cuda/GroupedBlas.cpp and native/GroupedMMUtils.h, torch 2.13: any floating type, in one kernel on
cards that have one, else group by group. torch's own shape rule takes bfloat16 alone and pads rows in CUDA builds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import register_flop_formula

aten = torch.ops.aten

_ROW_BYTES = 16


def install() -> None:
    """Register the shape rule and the count of operations."""
    register_op_impl(aten._grouped_mm.default)(_product)
    register_flop_formula(aten._grouped_mm)(_flops)


def _product(
    mode: FakeTensorMode,
    func: Any,
    first: Tensor,
    second: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """The output, its rows padded to 16 bytes (create_grouped_gemm_output_tensor).

    Args:
        mode: The mode that asks.
        func: The operator.
        first: [rows, in], or [groups, rows, in].
        second: [in, out], or [groups, in, out]; where both have two dimensions, the groups lie along `in`.
        ends: Where each group ends, [groups].
        bias: None.
        out_dtype: Of the output; None: that of `first`.
    """
    if first.device.type != "vgpu":
        return NotImplemented
    dtype = out_dtype or first.dtype
    shape = _shape(first.shape, second.shape, 0 if ends is None else ends.numel())
    aligned = _ROW_BYTES // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (shape[1] * row, row, 1) if len(shape) == 3 else (row, 1)
    return first.new_empty_strided(shape, strides, dtype=dtype)


def _shape(first: Sequence[int], second: Sequence[int], groups: int) -> tuple[int, ...]:
    if len(first) == 2:
        return (groups, first[0], second[1]) if len(second) == 2 else (first[0], second[2])
    return (first[1], second[1]) if len(second) == 2 else (first[0], first[1], second[2])


def _flops(first: Sequence[int], second: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Two for each element of the first matrices and column of the second that meet; a row meets one group."""
    meeting = first[1:] if len(first) == 3 and len(second) == 2 else first
    return 2 * prod(meeting) * second[-1]
