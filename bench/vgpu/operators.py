"""Operators that the CPU build of PyTorch cannot run for the virtual GPU: kernels and shape rules, registered once.

`install()` gives the device what lies below the dispatch modes (`torch.tensor(..., device=)` builds there), CUDA's
choice of attention, and shape rules for CUDA operators that come without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.vgpu.device import current
from bench.vgpu.realness import LIMIT

aten = torch.ops.aten

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register everything here; a second call does nothing."""
    if _libraries:
        return
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
    kernels.impl("empty.memory_format", _empty, "PrivateUse1")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    kernels.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    kernels.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    kernels.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    for name in (
        "_fused_sgd_",
        "_fused_sgd_.tensor_lr",
        "_fused_adagrad_",
        "_fused_adagrad_.tensor_lr",
        "_fused_adam_.tensor_lr",
        "_fused_adamw_.tensor_lr",
    ):
        kernels.impl(name, _in_place, "Meta")
    for name in ("silu_backward", "mish_backward", "_fused_rms_norm"):
        kernels.impl(name, _one_kernel, "PrivateUse1")
    _libraries.append(kernels)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> Tensor:
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> Tensor:
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy below the modes; the target keeps small values beside it, as it has no memory for them."""
    if source.device.type == "cpu" and source.numel() <= LIMIT:
        with torch._C._DisableTorchDispatch():
            target._vgpu_values = source.detach().clone()  # type: ignore[attr-defined]
    return target


def _in_place(*args: Any, **kwargs: Any) -> None:
    """Fused optimizers write into their arguments and return nothing."""


def _one_kernel(*args: Any, **kwargs: Any) -> Any:
    """CUDA has a kernel where other devices run a formula; with one registered, the operator reaches the mode whole."""
    raise NotImplementedError("the virtual GPU has no data")


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """New hidden state and the workspace of five gates (aten/src/ATen/native/cuda/RNN.cu, torch 2.13)."""
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty((hx.size(0), 5 * hx.size(1)))


def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of both gate inputs, the state and the biases (aten/src/ATen/native/cuda/RNN.cu, torch 2.13)."""
    rows, hidden = workspace.size(0), workspace.size(1) // 5
    gates = workspace.new_empty((rows, 3 * hidden))
    bias = gates.new_empty((3 * hidden,)) if has_bias else None
    return (
        gates,
        torch.empty_like(gates),
        torch.empty_like(grad_hy, memory_format=torch.contiguous_format),
        bias,
        torch.empty_like(bias) if bias is not None else None,
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot product attention with the kernel that CUDA would choose.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.13): flash, then memory-efficient, then plain math. On
    Hopper cuDNN's kernel comes before flash; it keeps an output and a log-sum-exp of the same sizes, and flash stands
    in for it here.
    """
    match _backend(query, key, value, attn_mask, dropout_p):
        case "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        case "efficient":
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _backend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float) -> str:
    major, minor = current().target.capability
    half = query.dtype in (torch.float16, torch.bfloat16)
    head, head_value = query.size(-1), value.size(-1)
    dense = query.dim() == 4 and key.size(-2) > 0 and query.size(-2) > 0
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    narrow = (major, minor) in ((8, 6), (8, 9), (12, 0), (12, 1)) and trains
    refused = narrow and (192 < head <= 224 or (head > 224 and dropout_p > 0))
    cuda = torch.backends.cuda
    if (
        cuda.flash_sdp_enabled()
        and dense
        and half
        and major >= 8
        and attn_mask is None
        and head == head_value <= 256
        and not refused
    ):
        return "flash"
    alignment = 8 if half else 4
    fits = major >= 8 or (major >= 5 and query.dtype != torch.bfloat16)
    if (
        cuda.mem_efficient_sdp_enabled()
        and dense
        and fits
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and head % alignment == 0
        and head_value % alignment == 0
    ):
        return "efficient"
    return "math"


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    head = query.size(-1)
    scale = scale if scale is not None else head**-0.5
    if head % 8:  # pad_last_dim<8> in aten/src/ATen/native/transformers/attention.cpp
        query, key, value = (torch.nn.functional.pad(each, (0, 8 - head % 8)) for each in (query, key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head] if head % 8 else out


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:  # convert_boolean_attn_mask
            infinity = torch.tensor(float("-inf"), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, torch.zeros_like(infinity), infinity)
        attn_mask = attn_mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale
    )[0]
