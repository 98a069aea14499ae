"""Scaled dot product attention: the kernel that CUDA would choose, and what each keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench.vgpu as vgpu

FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
NODES = {
    "ScaledDotProductFlashAttentionBackward0": "flash",
    "ScaledDotProductEfficientAttentionBackward0": "efficient",
}
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def heads(dtype: torch.dtype, width: int = 64, length: int = 16, count: int = 4, device: str = "vgpu") -> Tensor:
    return torch.rand(2, count, length, width, device=device, dtype=dtype, requires_grad=True)


def kernel(query: Tensor, key: Tensor | None = None, **options: Any) -> str:
    """The kernel that attended, from the graph it left; its backward runs."""
    key = query if key is None else key
    out = F.scaled_dot_product_attention(query, key, key, **options)
    assert out.shape == query.shape
    assert out.dtype is query.dtype
    names, nodes = [], [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.append(node.name())
            nodes += [edge[0] for edge in node.next_functions]
    out.sum().backward()
    return next((NODES[name] for name in names if name in NODES), "math")


@pytest.mark.parametrize(
    ("target", "dtype", "width", "expected"),
    [
        ("rtx4090", HALF, 64, "flash"),
        ("rtx4090", BRAIN, 64, "flash"),
        ("rtx4090", BRAIN, 63, "flash"),  # padded to 64
        ("rtx4090", SINGLE, 64, "efficient"),
        ("rtx4090", SINGLE, 62, "math"),  # not a multiple of 4
        ("rtx4090", DOUBLE, 64, "math"),
        ("rtx4090", BRAIN, 192, "flash"),
        ("rtx4090", BRAIN, 200, "efficient"),  # flash trains no head in (192, 224] here
        ("rtx4090", BRAIN, 256, "flash"),
        ("rtx4090", BRAIN, 264, "efficient"),
        ("h100", BRAIN, 200, "flash"),
        ("a100_80", HALF, 64, "flash"),
        ("v100_32", HALF, 64, "efficient"),
        ("v100_32", HALF, 60, "math"),  # tensor cores want multiples of 8
        ("v100_32", SINGLE, 63, "efficient"),
        ("v100_32", BRAIN, 64, "math"),
        ("k80", HALF, 64, "math"),
        ("k80", SINGLE, 64, "math"),
    ],
)
def test_by_card_type_and_head(target: str, dtype: torch.dtype, width: int, expected: str) -> None:
    with vgpu.virtual_gpu(target):
        assert kernel(heads(dtype, width)) == expected


class TestShapes:
    def test_masks_are_not_for_flash(self, card: vgpu.Device) -> None:
        for mask in (
            torch.ones(16, 16, dtype=torch.bool, device="vgpu"),
            torch.zeros(2, 1, 16, 16, dtype=BRAIN, device="vgpu"),
            torch.zeros(16, 16, dtype=BRAIN, device="vgpu", requires_grad=True),
        ):
            assert kernel(heads(BRAIN), attn_mask=mask) == "efficient"

    def test_causal(self, card: vgpu.Device) -> None:
        assert kernel(heads(BRAIN), is_causal=True) == "flash"
        assert kernel(heads(BRAIN, length=8), heads(BRAIN, length=16), is_causal=True) == "efficient"
        assert kernel(heads(DOUBLE), is_causal=True) == "math"

    def test_without_gradient_flash_takes_wide_heads(self, card: vgpu.Device) -> None:
        with torch.no_grad():
            query = heads(BRAIN, 200)
            before = torch.vgpu.memory_allocated()
            out = F.scaled_dot_product_attention(query, query, query)
            # The log-sum-exp in float32 is gone, the output stays.
            assert torch.vgpu.memory_allocated() - before == out.numel() * 2

    def test_three_dimensions_are_for_math(self, card: vgpu.Device) -> None:
        query = torch.rand(4, 16, 64, device="vgpu", dtype=BRAIN, requires_grad=True)
        assert kernel(query) == "math"

    def test_strides(self, card: vgpu.Device) -> None:
        assert kernel(torch.rand(2, 4, 64, 16, device="vgpu", dtype=BRAIN, requires_grad=True).mT) == "math"
        assert (
            kernel(torch.rand(2, 16, 4, 64, device="vgpu", dtype=BRAIN, requires_grad=True).transpose(1, 2)) == "flash"
        )

    def test_grouped_heads(self, card: vgpu.Device) -> None:
        query, key = heads(BRAIN), heads(BRAIN, count=2)
        assert kernel(query, key, enable_gqa=True) == "flash"
        mask = torch.zeros(16, 16, dtype=BRAIN, device="vgpu")
        assert kernel(query, key, enable_gqa=True, attn_mask=mask) == "efficient"
        assert kernel(heads(DOUBLE), heads(DOUBLE, count=2), enable_gqa=True) == "math"

    def test_autocast_decides_the_type(self, card: vgpu.Device) -> None:
        query = heads(SINGLE)
        with torch.autocast("vgpu", HALF):
            out = F.scaled_dot_product_attention(query, query, query)
        assert out.dtype is HALF
        assert out.grad_fn is not None
        assert NODES[out.grad_fn.name()] == "flash"


class TestChoice:
    @pytest.mark.parametrize(("backend", "name"), [(FLASH, "flash"), (EFFICIENT, "efficient"), (MATH, "math")])
    def test_by_context(self, card: vgpu.Device, backend: SDPBackend, name: str) -> None:
        with sdpa_kernel(backend):
            assert kernel(heads(BRAIN)) == name
        assert kernel(heads(BRAIN)) == "flash"

    def test_by_switch(self, card: vgpu.Device) -> None:
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            assert kernel(heads(BRAIN)) == "efficient"
        finally:
            torch.backends.cuda.enable_flash_sdp(True)

    def test_by_priority(self, card: vgpu.Device) -> None:
        with sdpa_kernel([EFFICIENT, FLASH], set_priority=True):
            assert kernel(heads(BRAIN)) == "efficient"

    def test_cudnn_is_flash_with_a_mask(self, card: vgpu.Device) -> None:
        with sdpa_kernel(CUDNN):
            assert kernel(heads(BRAIN)) == "flash"
            mask = torch.zeros(16, 16, dtype=BRAIN, device="vgpu")
            assert kernel(heads(BRAIN), attn_mask=mask) == "efficient"

    @pytest.mark.parametrize(
        ("target", "backend", "dtype"),
        [("rtx4090", FLASH, SINGLE), ("rtx4090", CUDNN, SINGLE), ("v100_32", FLASH, HALF), ("k80", EFFICIENT, SINGLE)],
    )
    def test_none_fits(self, target: str, backend: SDPBackend, dtype: torch.dtype) -> None:
        with (
            vgpu.virtual_gpu(target),
            sdpa_kernel(backend),
            pytest.raises(RuntimeError, match="No available kernel"),
        ):
            kernel(heads(dtype))


class TestMemory:
    """Bytes at [2, 4, 1024, 64]: q, k and v of 1 MiB each in half precision."""

    def peak(self, call: Any) -> int:
        before = torch.vgpu.memory_allocated()
        torch.vgpu.reset_peak_memory_stats()
        call()
        return torch.vgpu.max_memory_allocated() - before

    def test_flash_keeps_output_and_row_sums(self, card: vgpu.Device) -> None:
        query = heads(BRAIN, length=1024)
        before = torch.vgpu.memory_allocated()
        out = F.scaled_dot_product_attention(query, query, query)
        kept = torch.vgpu.memory_allocated() - before
        assert 2**20 + 2 * 4 * 1024 * 4 <= kept < 2**20 + 2 * 4 * 1024 * 4 + 2**13
        del out

    def test_math_keeps_scores_and_adds_the_mask_in_place(self, card: vgpu.Device) -> None:
        query = heads(SINGLE, length=1024)
        scores = 2 * 4 * 1024 * 1024 * 4
        mask = torch.zeros(1024, 1024, device="vgpu")
        with sdpa_kernel(MATH):
            F.scaled_dot_product_attention(query, query, query)  # takes the workspace
            plain = self.peak(lambda: F.scaled_dot_product_attention(query, query, query))
            masked = self.peak(lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=mask))
        assert 2 * scores < plain < 2.2 * scores  # scores and their softmax
        assert masked == plain

    def test_math_widens_half_types(self, card: vgpu.Device) -> None:
        query = heads(BRAIN, length=1024)
        with sdpa_kernel(MATH):
            F.scaled_dot_product_attention(query, query, query)
            assert self.peak(lambda: F.scaled_dot_product_attention(query, query, query)) > 2 * 2 * 4 * 1024 * 1024 * 4

    def test_boolean_masks_become_additive_ones(self, card: vgpu.Device) -> None:
        query = heads(BRAIN, length=1024)
        mask = torch.ones(2, 1, 1024, 1024, dtype=torch.bool, device="vgpu")
        before = torch.vgpu.memory_allocated()
        out = F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        assert torch.vgpu.memory_allocated() - before >= 2**20 + 2 * 1024 * 1024 * 2
        del out

    def test_masks_of_odd_length_are_padded(self, card: vgpu.Device) -> None:
        query, key = heads(BRAIN, length=1024), heads(BRAIN, length=1021)
        mask = torch.zeros(1024, 1021, dtype=BRAIN, device="vgpu")
        before = torch.vgpu.memory_allocated()
        out = F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
        assert torch.vgpu.memory_allocated() - before >= 2**20 + 1024 * 1024 * 2
        del out


def test_multihead_attention_module(card: vgpu.Device) -> None:
    module = nn.MultiheadAttention(64, 4, batch_first=True).to("vgpu")
    x = torch.rand(2, 8, 64, device="vgpu", requires_grad=True)
    for needs_weights in (True, False):
        out, weights = module(x, x, x, need_weights=needs_weights)
        assert (weights is not None) == needs_weights
        out.sum().backward()
