"""The card and the PyTorch release that a published row names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import bench.vgpu as vgpu
from bench.validation.published import GIB, MIB, Published
from bench.vgpu import Device, Target

_A100, _V100 = vgpu.find_target("a100_80"), vgpu.find_target("v100_32")

# Rows on cards that the target table lacks hold memory alone. Of the card that means its capability, which decides the
# cuBLAS workspace, its memory, and what is outside the allocator; the rest is a neighbour's.
_CARDS: Mapping[str, Target] = {
    "before Hopper (8,519,680 B workspace)": _A100,
    "A100-80": _A100,
    "H100-80": vgpu.find_target("h100"),
    "RTX 4090": vgpu.find_target("rtx4090"),
    "A10G": replace(_A100, name="a10g", title="NVIDIA A10G", memory_bytes=24 * GIB, capability=(8, 6)),
    "RTX PRO 6000 (94.97 GiB)": replace(
        _A100,
        name="rtx_pro_6000",
        title="NVIDIA RTX PRO 6000 Blackwell",
        memory_bytes=int(94.97 * GIB),
        capability=(12, 0),
        multiprocessors=188,  # NVIDIA RTX Blackwell PRO whitepaper: 24,064 CUDA cores, 128 a multiprocessor
    ),
    "V100-16": replace(
        _V100,
        name="v100_16",
        title="Tesla V100-SXM2-16GB",
        memory_bytes=int(15.77 * GIB),  # as PyTorch's messages show it
        outside_bytes=1343 * MIB,  # the row: what nvidia-smi showed before anything but the context was there
    ),
}

_RELEASES: Mapping[str, tuple[int, int]] = {
    "1.10 era": (1, 10),
    "2.0.0.dev": (2, 0),
    "2.4 era": (2, 4),
    "2.5.1+cu121": (2, 5),
    "2.6": (2, 6),
    "2.7 era": (2, 7),
    "2.9 era": (2, 9),
    "2.11": (2, 11),
}


class Setting(NamedTuple):
    """A card and a PyTorch release, in the words of the table."""

    card: str
    torch: str

    @property
    def target(self) -> Target:
        """The card."""
        return _CARDS[self.card]

    @property
    def release(self) -> tuple[int, int]:
        """PyTorch's major and minor version."""
        return _RELEASES[self.torch]

    def virtual(self) -> AbstractContextManager[Device]:
        """A virtual GPU of that card, following the rules of that release."""
        return vgpu.virtual_gpu(self.target, self.release)


def setting(row: Published) -> Setting:
    """What the row was measured on."""
    return Setting(row.card, row.torch)


def card() -> Any:
    """The module of the virtual GPU's functions, as `torch.cuda`."""
    return torch.get_device_module("vgpu")
