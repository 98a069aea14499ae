"""Memory that CUDA operators take and no tensor shows: cuBLAS workspaces, and temporaries by operator.

One entry each, with its source. All of it is allocated through the caching allocator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

KIB = 1024

CUBLAS_OPERATORS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
        aten.mm.dtype,
        aten.bmm.dtype,
    }
)
"""Operators that ask for a cuBLAS handle, and so for its workspace."""


def cublas_workspace_bytes(
    capability: tuple[int, int], config: str | None = None, release: tuple[int, int] = (2, 13)
) -> int:
    """Bytes of one cuBLAS workspace; 0: cuBLAS took its own memory, outside the allocator.

    aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: `:4096:2:16:8` by default, 32 MiB on Hopper and,
    since 2.12 (pull request 175344), on Blackwell; `CUBLAS_WORKSPACE_CONFIG` overrides, as the sum of its `:KiB:count`
    pairs. The allocator has provided it since 1.13 (pull request 85447).
    """
    if release < (1, 13):
        return 0
    if config and (pairs := re.findall(r":([0-9]+):([0-9]+)", config)):
        return sum(int(kib) * int(count) for kib, count in pairs) * KIB
    large = (9, 10, 12) if release >= (2, 12) else (9,)
    return 4096 * 8 * KIB if capability[0] in large else (4096 * 2 + 16 * 8) * KIB


Sizes = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[int]]


def _radix_sort_bytes(count: int, itemsize: int) -> tuple[int, ...]:
    """A sort of `count` keys with their positions: positions, sorted keys, sorted positions, and cub's own space.

    aten/src/ATen/cuda/cub.cuh, radix_sort_pairs (torch 2.13). cub's DeviceRadixSort works between plain pointers with one
    alternate buffer for keys and one for positions; its histograms, some KiB, are not counted.
    """
    one = count * itemsize
    return (one, one, one, 2 * one)


def _embedding_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """embedding_dense_backward sorts its indices above 3072 of them (aten/src/ATen/native/cuda/Embedding.cu, torch 2.13)."""
    indices = args[1]
    return _radix_sort_bytes(indices.numel(), indices.dtype.itemsize) if indices.numel() > 3072 else ()


def _index_put(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """index_put with accumulation sorts a linear index, int64 (aten/src/ATen/native/cuda/Indexing.cu, torch 2.13)."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate:
        return ()
    count = max(index.numel() for index in args[1] if index is not None)
    return (8 * count, *_radix_sort_bytes(count, 8))


TEMPORARIES: Mapping[OpOverload, Sizes] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put,
}
"""Sizes in bytes of an operator's temporaries, from its arguments."""

UNPRICED = frozenset(
    {
        aten.sort.default,
        aten.sort.stable,
        aten.topk.default,
        aten.cumsum.default,
        aten._unique2.default,
        aten.nonzero.default,
        aten.multinomial.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm_backward.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._cudnn_rnn.default,
    }
)
"""Operators known to take temporaries for which there is no entry yet; each use is counted and reported."""
