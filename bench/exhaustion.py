"""Whether an exception says that the card's memory ran out: the caching allocator is not the only one that asks."""

from __future__ import annotations

import torch

TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""PyTorch's words where CUDA itself (c10/cuda/CUDAException.cpp), cuBLAS or cuDNN (ATen/cuda/Exceptions.h, torch 2.13)
finds no memory: for a context, a handle, a kernel's image."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory of the card ran out, whoever asked for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)
