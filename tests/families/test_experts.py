"""Mixtures of experts: Mixtral and Qwen3-MoE of transformers, by grouped and by batched products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import GROUPED, HEAD, language_model
from live_bytes import agree
from torch import nn
from torch.utils.flop_counter import flop_registry
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import bench.vgpu as vgpu

aten = torch.ops.aten

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mixtral": lambda experts, chosen, **options: MixtralForCausalLM(
        MixtralConfig(**GROUPED, num_local_experts=experts, num_experts_per_tok=chosen, **options)
    ),
    "qwen3": lambda experts, chosen, **options: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **GROUPED,
            head_dim=HEAD,
            moe_intermediate_size=16,
            num_experts=experts,
            num_experts_per_tok=chosen,
            **options,
        )
    ),
}


@pytest.mark.parametrize("products", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(
    ("name", "experts", "chosen", "batch", "length"),
    [("mixtral", 4, 2, 2, 48), ("qwen3", 8, 3, 1, 100)],
)
def test_mixtures(name: str, experts: int, chosen: int, batch: int, length: int, products: str) -> None:
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": products}
    card = agree(language_model(lambda: MODELS[name](experts, chosen, **options), batch, length))
    assert not card.stand_ins  # which expert a token goes to is not asked


@pytest.fixture
def device() -> Any:
    with vgpu.virtual_gpu("rtx4090"):
        yield torch.device("vgpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((96, 32), (4, 32, 24), (96, 24)),
        ((32, 96), (96, 24), (4, 32, 24)),
        ((4, 8, 32), (32, 96), (8, 96)),
        ((4, 8, 32), (4, 32, 24), (4, 8, 24)),
    ],
)
def test_grouped_products_of_every_type(
    device: torch.device, first: Any, second: Any, expected: Any, dtype: Any
) -> None:
    """CUDA takes bfloat16 in one kernel, the others group by group (native/cuda/GroupedBlas.cpp)."""
    ends = torch.zeros(4, dtype=torch.int32, device=device)
    matrices = [torch.empty(shape, dtype=dtype, device=device) for shape in (first, second)]
    batched = len(first) == len(second) == 3
    out = torch._grouped_mm(*matrices, offs=None if batched else ends)
    assert out.shape == expected
    assert out.dtype is dtype


def test_rows_are_padded_to_16_bytes(device: torch.device) -> None:
    ends = torch.zeros(4, dtype=torch.int32, device=device)
    first, second = torch.empty(96, 32, device=device), torch.empty(4, 32, 10, device=device)
    out = torch._grouped_mm(first, second, offs=ends)
    assert out.stride() == (12, 1)
    assert out.untyped_storage().nbytes() == (95 * 12 + 10) * 4


@pytest.mark.parametrize(
    ("first", "second", "products"),
    [
        ((96, 32), (4, 32, 24), 96 * 32 * 24),
        ((32, 96), (96, 24), 32 * 96 * 24),
        ((4, 8, 32), (32, 96), 8 * 32 * 96),
        ((4, 8, 32), (4, 32, 24), 4 * 8 * 32 * 24),
    ],
)
def test_every_row_is_multiplied_once(first: Any, second: Any, products: int) -> None:
    matrices = [torch.empty(shape, device="meta") for shape in (first, second)]
    assert flop_registry[aten._grouped_mm](*matrices, out_val=None) == 2 * products
