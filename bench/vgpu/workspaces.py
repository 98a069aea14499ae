"""Workspaces of cuBLAS and cuBLASLt, which live in the caching allocator; sizes and lifetimes by PyTorch release."""

from __future__ import annotations

import re

import torch

aten = torch.ops.aten

KIB = 1024

CUBLAS_OPERATORS = frozenset(
    {
        aten.mm.default,
        aten.mm.dtype,
        aten.mm.out,
        aten.addmm.default,
        aten.addmm.dtype,
        aten.addmm.out,
        aten.bmm.default,
        aten.bmm.dtype,
        aten.bmm.out,
        aten.baddbmm.default,
        aten.baddbmm.dtype,
        aten.baddbmm.out,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
        aten.vdot.default,
        aten._addmm_activation.default,
        aten._scaled_mm.default,
    }
)
"""Operators that ask for a cuBLAS handle, and so for its workspace."""


def cublas_workspace_bytes(
    capability: tuple[int, int], config: str | None = None, release: tuple[int, int] = (2, 13)
) -> int:
    """Bytes of one cuBLAS workspace; 0: cuBLAS took its own memory, outside the allocator.

    aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: `:4096:2:16:8` by default, 32 MiB on Hopper and,
    since 2.12 (pull request 175344), on Blackwell; `CUBLAS_WORKSPACE_CONFIG` overrides, as the sum of its `:KiB:count`
    pairs. The allocator has provided it since 1.13 (pull request 85447). cublasLt has used the same memory since 2.12
    (pull request 175879); before that it took 1 MiB of its own, which `cublaslt_workspace_bytes` gives.
    """
    if release < (1, 13):
        return 0
    if config and (pairs := re.findall(r":([0-9]+):([0-9]+)", config)):
        return sum(int(kib) * int(count) for kib, count in pairs) * KIB
    large = (9, 10, 12) if release >= (2, 12) else (9,)
    return 4096 * 8 * KIB if capability[0] in large else (4096 * 2 + 16 * 8) * KIB


def cublaslt_workspace_bytes(release: tuple[int, int]) -> int:
    """Bytes of cublasLt's own workspace, 0 where it shares cuBLAS's.

    1 MiB by default (aten/src/ATen/cuda/CUDABlas.cpp, `CUBLASLT_WORKSPACE_SIZE`), taken for each call by the epilogue
    that adds a bias, 1.11 to 2.8, and kept for each thread and stream from 2.9 (pull request 156495) to 2.11.
    """
    return 1024 * KIB if (1, 11) <= release < (2, 12) else 0
