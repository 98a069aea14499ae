"""Figures that tests of the virtual GPU compare."""

from __future__ import annotations

from torch import nn


def blocks(*sizes_bytes: int) -> int:
    """Bytes of the blocks for these requests, where none of them is split off a larger one that stays whole."""
    return sum((size + 511) // 512 * 512 for size in sizes_bytes)


def parameter_blocks(module: nn.Module) -> int:
    """Bytes of the blocks that hold a module's parameters."""
    return blocks(*(p.numel() * p.itemsize for p in module.parameters()))
