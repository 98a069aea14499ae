"""The short key to FakeTensorMode's cache: two calls share an outcome only if it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import bench.vgpu as vgpu

Call = Callable[[str], Tensor]

CALLS: dict[str, Call] = {
    "int scalar": lambda device: torch.ones(3, dtype=torch.int64, device=device) * 2,
    "float scalar": lambda device: torch.ones(3, dtype=torch.int64, device=device) * 2.0,
    "bool scalar": lambda device: torch.ones(3, dtype=torch.int64, device=device) * True,
    "one": lambda device: torch.ones(3, dtype=torch.int32, device=device) * 1,
    "one as float": lambda device: torch.ones(3, dtype=torch.int32, device=device) * 1.0,
    "transposed": lambda device: torch.ones(3, 4, device=device).t() + 1,
    "not transposed": lambda device: torch.ones(4, 3, device=device) + 1,
    "offset view": lambda device: torch.ones(8, device=device)[2:].view(2, 3),
    "other offset": lambda device: torch.ones(9, device=device)[3:].view(2, 3),
    "expanded": lambda device: torch.ones(1, 3, device=device).expand(4, 3).exp(),
    "half": lambda device: (
        torch.ones(3, 3, dtype=torch.float16, device=device) @ torch.ones(3, 3, dtype=torch.float16, device=device)
    ),
    "channels last": lambda device: torch.ones(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last).relu(),
    "sum to double": lambda device: torch.ones(3, device=device).sum(dtype=torch.float64),
    "sum": lambda device: torch.ones(3, device=device).sum(),
    "split": lambda device: torch.ones(6, 2, device=device).split(2)[1],
    "cat": lambda device: torch.cat([torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)]),
    "max with indices": lambda device: torch.ones(3, 4, device=device).max(dim=1).indices,
}


def shape_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset()


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_cached_outcomes_are_those_of_real_tensors(default_dtype: torch.dtype) -> None:
    expected = {name: shape_of(call("cpu")) for name, call in CALLS.items()}
    with vgpu.virtual_gpu("rtx4090"):
        for _ in range(3):  # the later rounds come from the cache
            assert {name: shape_of(call("vgpu")) for name, call in CALLS.items()} == expected


def test_the_cache_is_used_and_views_share_storage() -> None:
    with vgpu.virtual_gpu("rtx4090") as device:
        base = torch.ones(4, 6, device="vgpu")
        before = device.memory.allocator.allocated_bytes
        views = [base.view(6, 4)[1:] for _ in range(3)]
        assert device.memory.allocator.allocated_bytes == before
        assert {view.untyped_storage()._cdata for view in views} == {base.untyped_storage()._cdata}


def test_gradients_are_asked_for_as_before() -> None:
    with vgpu.virtual_gpu("rtx4090"):
        for needs in (False, True, False):
            weight = torch.ones(3, 3, device="vgpu", requires_grad=needs)
            assert (weight @ torch.ones(3, 3, device="vgpu")).requires_grad is needs
