"""Scaled dot product attention with the kernel that CUDA would choose.

Rules: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp, torch 2.13; each function names the one
that it follows. Nested tensors have no place here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.vgpu.device import current

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, and the card's compute capability (sdp_params)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    capability: tuple[int, int]

    @property
    def trains(self) -> bool:
        """Whether a backward may follow (input_requires_grad)."""
        return torch.is_grad_enabled() and any(each.requires_grad for each in (self.query, self.key, self.value))

    @property
    def head(self) -> int:
        return self.query.size(-1)

    @property
    def half(self) -> bool:
        return self.query.dtype in _HALVES


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
    """Scaled dot product attention (scaled_dot_product_attention).

    cuDNN's kernel keeps an output and a log-sum-exp as flash does, and takes a mask as the memory-efficient one does;
    these stand in for it.
    """
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, current().target.capability)
    backend = chosen(call)
    if backend == SDPBackend.CUDNN_ATTENTION:
        flash = attn_mask is None and _flash_fits(call)
        backend = SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION
    if attn_mask is not None:
        attn_mask = _additive(attn_mask, query.dtype)
    if backend == SDPBackend.FLASH_ATTENTION:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        return _efficient(call, attn_mask, scale)
    with _adding_in_place():
        out: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out


def chosen(call: _Call) -> SDPBackend:
    """The first backend in the order of priority that is enabled and takes the call (select_sdp_backend).

    Raises:
        RuntimeError: There is none; torch's own words.
    """
    for backend in _order(call.capability):
        if _TAKES[backend](call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(capability: tuple[int, int]) -> list[SDPBackend]:
    """The order of priority: one that was set, or torch's, in which cuDNN comes first on Hopper (priority_order)."""
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order() if number in _KNOWN]
    if order == _DEFAULT and capability in ((9, 0), (10, 0), (10, 3)):  # check_prefer_cudnn_attention
        return _CUDNN_FIRST
    return order


def _shapes_fit(call: _Call) -> bool:
    """check_tensor_shapes, check_nonzero_sequence_lengths_dense, check_batch_size_and_num_heads_dense, strides."""
    query, key, value = call.query, call.key, call.value
    if not query.dim() == key.dim() == value.dim() == 4 or 0 in (query.size(2), key.size(2), value.size(2)):
        return False
    if not query.size(0) == key.size(0) == value.size(0) or key.size(1) != value.size(1):
        return False
    heads_fit = query.size(1) % key.size(1) == 0 if call.enable_gqa else query.size(1) == key.size(1)
    mask_fits = call.mask is None or call.mask.stride(-1) == 1
    return heads_fit and mask_fits and all(each.stride(-1) == 1 or each.size(-1) == 1 for each in (query, key, value))


def _flash_fits(call: _Call) -> bool:
    """can_use_flash_attention, less the switch."""
    narrow = call.capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1)) and call.trains
    refused = narrow and call.head > 192 and (call.head <= 224 or call.dropout_p > 0)
    return (
        call.mask is None
        and call.head == call.key.size(-1) == call.value.size(-1) <= 256
        and call.capability[0] >= 8
        and not refused
        and not (call.is_causal and call.query.size(-2) != call.key.size(-2))
        and call.half
        and _shapes_fit(call)
    )


def _takes_flash(call: _Call) -> bool:
    return torch.backends.cuda.flash_sdp_enabled() and _flash_fits(call)


def _takes_efficient(call: _Call) -> bool:
    """can_use_mem_efficient_attention."""
    major = call.capability[0]
    kinds = (torch.float32, *_HALVES) if major >= 8 else (torch.float32, torch.float16)
    alignment = _gemm_alignment(major, call.half)
    offsets = (each.storage_offset() % alignment == 0 for each in (call.query, call.key, call.value))
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and major >= 5
        and call.head == call.key.size(-1)
        and call.head % alignment == 0
        and call.value.size(-1) % alignment == 0
        and (major < 8 or all(offsets))
        and _shapes_fit(call)
        and call.query.dtype in kinds
    )


def _gemm_alignment(major: int, half: bool) -> int:
    """minimum_gemm_alignment: 128 bits where tensor cores are used."""
    tensor_cores = major >= 8 or (major == 7 and half)
    return max(4 if major >= 8 else 1, (8 if half else 4) if tensor_cores else 1)


def _takes_cudnn(call: _Call) -> bool:
    """can_use_cudnn_attention, with cuDNN 9.15 or later."""
    cudnn_halves = _HALVES if call.capability[0] >= 8 else (torch.float16,)
    limit = 256 if call.capability in ((9, 0), (10, 0), (10, 3)) else 128
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and call.capability[0] >= 8
        and call.query.dtype in cudnn_halves
        and (call.dropout_p * 16).is_integer()
        and call.head % 8 == call.value.size(-1) % 8 == 0
        and max(call.head, call.value.size(-1)) <= limit
        and call.key.size(-2) != 1
        and _shapes_fit(call)
    )


def _takes_math(call: _Call) -> bool:
    return bool(torch.backends.cuda.math_sdp_enabled())


_TAKES = {
    SDPBackend.FLASH_ATTENTION: _takes_flash,
    SDPBackend.EFFICIENT_ATTENTION: _takes_efficient,
    SDPBackend.MATH: _takes_math,
    SDPBackend.CUDNN_ATTENTION: _takes_cudnn,
}
_DEFAULT = list(_TAKES)  # the order of aten/src/ATen/Context.h
_KNOWN = {backend.value for backend in _TAKES}


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """convert_boolean_attn_mask: 0 where attention goes, minus infinity where not."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.tensor(float("-inf"), dtype=dtype, device=mask.device))


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    head = query.size(-1)
    scale = scale if scale is not None else head**-0.5
    if head % 8:  # pad_last_dim
        query, key, value = (torch.nn.functional.pad(each, (0, 8 - head % 8)) for each in (query, key, value))
    out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[
        0
    ]
    return out[..., :head] if head % 8 else out


def _efficient(call: _Call, mask: Tensor | None, scale: float | None) -> Tensor:
    query, key, value = call.query, call.key, call.value
    if call.enable_gqa and query.size(1) != key.size(1):
        groups = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if mask is not None:  # preprocess_mask
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            length = mask.size(-1)
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, call.trains, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return out


@contextmanager
def _adding_in_place() -> Iterator[None]:
    """The formula adds the mask to its scores in place, unless a dispatch mode stands in its way."""
    device = current()
    device.adds_in_place = True
    try:
        yield
    finally:
        device.adds_in_place = False
