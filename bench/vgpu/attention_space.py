"""Memory that CUDA's fused attention takes beside its tensors: partial results forward, accumulators backward.

Sources, torch 2.13: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, attention_backward.cu, and
mem_eff_attention/kernel_backward.h with kernels/cutlassB.h, which the wheel ships. All sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor


def _up(number: int, multiple: int) -> int:
    return ceil(number / multiple) * multiple


def _rounded_head(width: int) -> int:
    return _up(width, 32) if width <= 192 else 256


def flash_forward(query: Tensor, key: Tensor, dropout_p: float, multiprocessors: int) -> Sequence[int]:
    """Partial outputs and sums where few blocks of queries leave processors idle (set_params_splitkv).

    Tensors are [batch, heads, length, width].
    """
    batch, heads, queries, width = query.shape
    if dropout_p:
        return ()
    key_block = 256 if width <= 64 else 128 if width <= 128 else 64
    splits = _key_splits(batch * heads * ceil(queries / 64), 2 * multiprocessors, ceil(key.size(2) / key_block))
    rows = splits * batch * heads * queries
    return (rows * 4, rows * _rounded_head(width) * 4) if splits > 1 else ()


def _key_splits(blocks: int, processors: int, key_blocks: int) -> int:
    """num_splits_heuristic: the fewest splits that come within 15 % of the best use of the processors."""
    if blocks >= 0.8 * processors:
        return 1
    use = {}
    for splits in range(1, min(128, processors, key_blocks) + 1):
        if splits == 1 or ceil(key_blocks / splits) != ceil(key_blocks / (splits - 1)):
            waves = blocks * splits / processors
            use[splits] = waves / ceil(waves)
    return next(splits for splits, share in use.items() if share >= 0.85 * max(use.values()))


def flash_backward(query: Tensor, key: Tensor) -> Sequence[int]:
    """mha_bwd: row sums of dO x O, the queries' gradient in float32, and with grouped heads dK and dV of each head."""
    batch, heads, queries, width = query.shape
    rows = batch * heads * _up(queries, 128)
    expanded = batch * key.size(2) * heads * width * query.dtype.itemsize if key.size(1) != heads else 0
    return (rows * 4, rows * _rounded_head(width) * 4, expanded, expanded)


def efficient_backward(
    query: Tensor, key: Tensor, value: Tensor, capability: tuple[int, int]
) -> Sequence[Sequence[int]]:
    """_efficient_attention_backward: row sums of dO x O, and the kernel's workspace.

    From capability 7.0 the workspace has the gradient of the queries in float32 tiles, for half precision heads wider
    than a block those of keys and values, too. Float32 forms the row sums from a whole product dO x O.
    """
    batch, heads, queries, width = query.shape
    rows = batch * heads * queries
    half = query.dtype in (torch.float16, torch.bfloat16)
    widest = max(width, value.size(-1))
    query_block, key_block, in_registers = _backward_blocks(half, widest, capability)
    tiles = ceil(queries / query_block) * ceil(width / key_block)
    elements = tiles * (4 + query_block * key_block) if capability[0] >= 7 else 0
    if half and not in_registers:
        splits = max(1, min(ceil(key.size(2) / key_block), 200 // (batch * heads)))
        elements += splits * key_block * (_up(width, query_block) + _up(value.size(-1), query_block))
    whole = () if half else (rows * value.size(-1) * 4,)
    return ([*whole, rows * 4], [rows * 4, batch * heads * _up(elements, 4) * 4])


def _backward_blocks(half: bool, width: int, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """Block of queries, block of keys, and whether dK and dV stay in registers: the kernel that cutlassB.h puts first.

    Large blocks need more than 100 KB of shared memory, which only 8.0 and 9.0 have.
    """
    roomy = capability in ((8, 0), (9, 0), (10, 0))
    if width <= 64:
        return 64, 64, half
    if width <= 96 and half and capability in ((8, 6), (8, 9)):
        return 128, 64, True
    if width <= 128:
        block = 128 if roomy else 64
        return block, (128 if roomy and half else 64), half and roomy
    return (128 if roomy else 64), 64, False
