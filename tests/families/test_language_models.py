"""Transformers: models, attention kernels, precision, batch and sequence length varied."""

from __future__ import annotations

import warnings

import pytest
import torch
from language_models import GROUPS, HEAD, HEADS, LAYERS, MODELS, WIDTH, language_model
from live_bytes import Family, Term, agree, on_card
from torch import nn


def family(name: str, attention: str, batch: int, length: int, autocast: bool, accumulation: int = 1) -> Family:
    return language_model(
        lambda: MODELS[name](attn_implementation=attention),
        batch,
        length,
        cached=name != "bert",
        autocast=autocast,
        accumulation=accumulation,
    )


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "batch", "length"), [("bert", 2, 48), ("gpt2", 3, 40), ("llama", 2, 64), ("qwen3", 1, 100), ("t5", 2, 48)]
)
def test_attention_by_formula(name: str, batch: int, length: int, autocast: bool) -> None:
    """No fused kernel: not one byte of difference."""
    agree(family(name, "eager", batch, length, autocast))


def sums_of_exponents(batch: int, length: int) -> Term:
    """Each layer's, of each head and query, in rows padded to 32 (and the state of a generator of random numbers).

    aten/src/ATen/native/transformers/cuda/attention.cu, _efficient_attention_forward. The CPU's kernel pads nothing.
    """
    padded = -(-length // 32) * 32
    return Term("the kernel pads its sums", LAYERS * (batch * HEADS * (padded - length) * 4 + 16))


@pytest.mark.parametrize(("batch", "length"), [(3, 33), (4, 96)])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_memory_efficient_attention(name: str, batch: int, length: int) -> None:
    agree(family(name, "sdpa", batch, length, autocast=False), sums_of_exponents(batch, length))


@pytest.mark.parametrize(("name", "batch", "length"), [("llama", 2, 48), ("qwen3", 1, 100)])
def test_memory_efficient_attention_with_grouped_heads(name: str, batch: int, length: int) -> None:
    """The kernel knows no groups: keys and values are kept for each head of the queries (attention.cpp)."""
    repeated = LAYERS * 2 * batch * (HEADS - GROUPS) * length * HEAD * 4
    agree(
        family(name, "sdpa", batch, length, autocast=False),
        sums_of_exponents(batch, length),
        Term("keys and values are repeated", repeated),
    )


@pytest.mark.parametrize(
    ("name", "batch", "length"), [("bert", 2, 48), ("gpt2", 1, 100), ("llama", 1, 100), ("qwen3", 2, 48)]
)
def test_flash_attention(name: str, batch: int, length: int) -> None:
    """Sums of exponents as on the CPU; two numbers of a generator's state, and a third that is not used."""
    agree(family(name, "sdpa", batch, length, True), Term("a generator's state is kept", LAYERS * 3 * 8))


@pytest.mark.parametrize("autocast", [False, True])
def test_t5_by_fused_kernels(autocast: bool) -> None:
    """It runs; its bias, which is trained, sends the CPU to the formula, so that there is nothing to compare."""
    _, card = on_card(family("t5", "sdpa", 2, 48, autocast))
    assert not card.stand_ins
    assert not card.unpriced


def test_accumulated_gradients() -> None:
    agree(family("llama", "eager", 2, 48, autocast=False, accumulation=3))


def checkpointed() -> nn.Module:
    model = MODELS["llama"](attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases call it activation_checkpointing_enable
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize(("batch", "length"), [(2, 48), (1, 128)])
def test_checkpointing(batch: int, length: int) -> None:
    agree(language_model(checkpointed, batch, length))


@pytest.mark.parametrize(("batch", "length"), [(2, 48), (3, 64)])
def test_dropout(batch: int, length: int) -> None:
    """A byte for each element, where the CPU keeps a factor: behind BERT's embeddings, and twice in each layer.

    aten/src/ATen/native/cuda/Dropout.cu and native/Dropout.cpp.
    """
    masks = (1 + 2 * LAYERS) * batch * length * WIDTH
    agree(
        language_model(lambda: MODELS["bert"](dropout=0.1, attn_implementation="eager"), batch, length, cached=False),
        Term("dropout keeps a mask of bytes", masks * (1 - 4)),
    )


def test_models_are_built_without_a_download() -> None:
    """Sizes as told, so that the formulas above are those of these models."""
    for name, make in MODELS.items():
        embeddings = make().get_input_embeddings()
        assert embeddings.weight.shape[1] == WIDTH, name
        assert embeddings.weight.dtype is torch.float32
