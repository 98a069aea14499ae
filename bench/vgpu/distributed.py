"""Collectives over a fake process group, of which this process is the only rank that runs.

The group (torch/testing/_internal/distributed/fake_pg.py) moves nothing. What other ranks would have sent is unknown;
sums over them keep the values of this rank, which is what the group leaves there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.parallel.distributed as _data_parallel
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from bench.vgpu.known import known

if TYPE_CHECKING:
    from bench.vgpu.mode import VirtualMode

c10d = torch.ops.c10d

_KEEPING = {c10d.allreduce_.default, c10d.allreduce_coalesced_.default, c10d.broadcast_.default, c10d.reduce_.default}


def all_reduce(mode: VirtualMode, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`all_reduce`, whose work has a result: DistributedDataParallel asks for it."""
    result = mode.plain(func, types, args, kwargs)
    if result is NotImplemented:
        return result
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(list(result[0]))
    return result[0], torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def follow_collective(mode: VirtualMode, func: OpOverload, args: Sequence[Any]) -> None:
    """Give up what is known of tensors that other ranks have written to; what is kept of sums is a stand-in."""
    for tensor in tree_leaves(args):
        twin = getattr(tensor, "_vgpu_twin", None) if isinstance(tensor, Tensor) else None
        if twin is None or not twin.valid[0] or known(tensor) is None:
            continue
        if func not in _KEEPING:
            twin.valid[0] = False
        elif func is not c10d.broadcast_.default:
            mode.device.stand_ins[str(func)] += 1


data_parallel: Any = _data_parallel


@contextmanager
def alike_on_all_ranks() -> Iterator[None]:
    """Spare DistributedDataParallel the comparison of shapes with ranks that do not run."""
    compare = data_parallel._verify_param_shape_across_processes
    data_parallel._verify_param_shape_across_processes = lambda *args, **kwargs: None
    try:
        yield
    finally:
        data_parallel._verify_param_shape_across_processes = compare
