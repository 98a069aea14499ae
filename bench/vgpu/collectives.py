"""Time of collectives in a group of cards.

A ring moves (n - 1) / n of the gathered or scattered bytes over each card's slowest link, and twice that for a full
reduction (NCCL's own account of bus bandwidth, nccl-tests doc/PERFORMANCE.md). Within a node the link is NVLink. Across
nodes NCCL builds a ring per network adapter, so the link is the adapter of each card times the cards of a node, shared
by the ring of all: no more than NVLink carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from bench.targets import Target
from bench.vgpu.kernels import tensors_in, total_bytes

c10d = torch.ops.c10d

# Operator -> how often the whole passes every link.
COLLECTIVES: dict[OpOverload, float] = {
    c10d._allgather_base_.default: 1.0,
    c10d.allgather_.default: 1.0,
    c10d.allgather_into_tensor_coalesced_.default: 1.0,
    c10d._reduce_scatter_base_.default: 1.0,
    c10d.reduce_scatter_.default: 1.0,
    c10d.reduce_scatter_tensor_coalesced_.default: 1.0,
    c10d.allreduce_.default: 2.0,
    c10d.allreduce_coalesced_.default: 2.0,
    c10d.broadcast_.default: 1.0,
}


def link_bytes_s(target: Target) -> float:
    """Bytes/s that a ring over the whole group attains per card; 0 for a card alone."""
    group = target.group
    if group.nodes == 1:
        return group.nvlink_bytes_s
    return min(group.nvlink_bytes_s, group.network_bytes_s * group.cards)


def collective_s(func: OpOverload, args: Sequence[Any], target: Target) -> float:
    """Seconds of a collective whose largest tensor is the whole that is gathered, scattered or reduced."""
    link = link_bytes_s(target)
    if target.world_size == 1 or link == 0:
        return 0.0
    lists = [tensors_in(value) if isinstance(value, list | tuple) else tensors_in([value]) for value in args]
    whole_bytes = max((total_bytes(tensors) for tensors in lists if tensors), default=0)
    return COLLECTIVES[func] * whole_bytes * (target.world_size - 1) / target.world_size / link
