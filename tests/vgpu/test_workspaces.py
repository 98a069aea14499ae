"""cuBLAS workspaces: how many, how large, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench.vgpu as vgpu

ADA, HOPPER = 8_519_680, 32 * 2**20


@pytest.mark.parametrize(
    ("target", "size_bytes"),
    [("rtx4090", ADA), ("a100_80", ADA), ("v100_32", ADA), ("k80", ADA), ("h100", HOPPER)],
)
def test_one_after_a_forward_two_after_a_backward(target: str, size_bytes: int) -> None:
    with vgpu.virtual_gpu(target):
        layer = nn.Linear(8, 8, device="vgpu")
        x = torch.rand(4, 8, device="vgpu")
        before = torch.vgpu.memory_allocated()
        for _ in range(2):
            with torch.no_grad():
                layer(x)
            assert torch.vgpu.memory_allocated() == before + size_bytes
        for _ in range(2):
            layer(x).sum().backward()
            layer.zero_grad()
            assert torch.vgpu.memory_allocated() == before + 2 * size_bytes
        torch.vgpu.empty_cache()
        assert torch.vgpu.memory_allocated() == before + 2 * size_bytes


@pytest.mark.parametrize(
    ("config", "size_bytes"), [(":4096:8", 32 * 2**20), (":16:8", 128 * 2**10), (":4096:2:16:8", ADA)]
)
def test_environment_overrides(monkeypatch: pytest.MonkeyPatch, config: str, size_bytes: int) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    with vgpu.virtual_gpu("rtx4090"):
        x = torch.rand(8, 8, device="vgpu")
        x @ x
        assert torch.vgpu.memory_allocated() == 512 + size_bytes


PRODUCTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x @ x,
    lambda x: x[0] @ x[0],
    lambda x: x @ x[0],
    lambda x: x[None] @ x[None],
    lambda x: F.linear(x, x, x[0]),
    lambda x: torch.baddbmm(x[None], x[None], x[None]),
    lambda x: torch.einsum("ij,jk->ik", x, x),
]


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_take_one(card: vgpu.Device, product: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(8, 8, device="vgpu")
    product(x)
    assert torch.vgpu.memory_allocated() == 512 + ADA


def test_nothing_else_does(card: vgpu.Device) -> None:
    x = torch.rand(8, 8, device="vgpu")
    x.softmax(-1).sum().exp() * 2
    x.matmul(torch.empty(8, 0, device="vgpu"))
    assert torch.vgpu.memory_allocated() in (512, 512 + ADA)


def test_recomputation_in_a_backward_uses_its_handle(card: vgpu.Device) -> None:
    layer = nn.Linear(8, 8, device="vgpu")
    x = torch.rand(4, 8, device="vgpu", requires_grad=True)
    before = torch.vgpu.memory_allocated()
    loss = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum()
    loss.backward()
    layer.zero_grad()
    x.grad = None
    del loss
    assert torch.vgpu.memory_allocated() == before + 2 * ADA
