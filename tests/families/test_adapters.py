"""LoRA by peft: frozen weights, small trained ones beside them."""

from __future__ import annotations

import warnings

import pytest
from language_models import LAYERS, MODELS, WIDTH, language_model
from live_bytes import agree
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of what it imports is deprecated
    from peft import LoraConfig, get_peft_model


def adapted(name: str, rank: int, dropout: float = 0.0) -> nn.Module:
    config = LoraConfig(r=rank, lora_dropout=dropout, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases say activation for gradient checkpointing
        model: nn.Module = get_peft_model(MODELS[name](attn_implementation="eager"), config)
    return model


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "rank", "batch", "length"), [("llama", 4, 2, 48), ("qwen3", 8, 1, 100)])
def test_lora(name: str, rank: int, batch: int, length: int, autocast: bool) -> None:
    agree(language_model(lambda: adapted(name, rank), batch, length, autocast=autocast))


def test_accumulated() -> None:
    agree(language_model(lambda: adapted("llama", 4), 2, 48, accumulation=2))


def test_only_the_adapters_are_trained() -> None:
    trained = sum(p.numel() for p in adapted("llama", 4).parameters() if p.requires_grad)
    assert trained == LAYERS * 2 * 2 * 4 * WIDTH
