"""Models of transformers, which look for fake tensors and must find none."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import bench.vgpu as vgpu

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.import_utils import is_tracing

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL)),
}
CAUSAL = ("qwen3", "llama", "gpt2")


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...] | None, bool]]:
    """Shape of the mask and the causal flag of every attention."""
    seen: list[tuple[tuple[int, ...] | None, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watch(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        seen.append((None if attn_mask is None else tuple(attn_mask.shape), bool(options.get("is_causal"))))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    return seen


def test_tensors_are_not_taken_for_fake_ones(card: vgpu.Device) -> None:
    for tensor in (torch.rand(3, device="vgpu"), torch.rand(3), torch.nn.Parameter(torch.rand(3, device="vgpu"))):
        assert not is_tracing(tensor)
        assert not isinstance(tensor, torch._subclasses.FakeTensor)


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 16)).to("vgpu")


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(card: vgpu.Device, name: str) -> None:
    model = MODELS[name]().to("vgpu")
    ids = tokens()
    out = model(input_ids=ids, labels=ids)
    assert out.logits.shape == (2, 16, 64)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert not card.stand_ins


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", [False, True])
def test_no_mask_is_built_without_padding(card: vgpu.Device, masks: list[Any], name: str, given: bool) -> None:
    model = MODELS[name]().to("vgpu")
    ids = tokens()
    model(input_ids=ids, **({"attention_mask": torch.ones_like(ids)} if given else {}))
    assert set(masks) == {(None, name in CAUSAL)}
    assert not card.stand_ins


@pytest.mark.parametrize("name", MODELS)
def test_padding_builds_a_mask(card: vgpu.Device, masks: list[Any], name: str) -> None:
    model = MODELS[name]().to("vgpu")
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model(input_ids=ids, attention_mask=mask)
    assert set(masks) == {((2, 1, 16, 16), False)}


def test_a_mask_that_data_decide_is_kept(card: vgpu.Device, masks: list[Any]) -> None:
    ids = torch.randint(0, 64, (2, 16), device="vgpu")
    MODELS["llama"]().to("vgpu")(input_ids=ids, attention_mask=(ids != 0).long())
    assert set(masks) == {((2, 1, 16, 16), False)}
    assert card.stand_ins


@pytest.mark.parametrize("name", CAUSAL)
def test_generation_ends_at_the_length_asked_for(card: vgpu.Device, name: str) -> None:
    model = MODELS[name]().to("vgpu").eval()
    model.generation_config.pad_token_id = 0
    out = model.generate(tokens(), max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 20)


@pytest.mark.parametrize("name", CAUSAL)
def test_half_precision_and_gradient_checkpointing(card: vgpu.Device, name: str) -> None:
    model = MODELS[name]().to("vgpu", torch.bfloat16).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases call it activation_checkpointing_enable
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_same_bytes_as_live_tensors_on_the_cpu(card: vgpu.Device) -> None:
    """Parameters, gradients and logits after a backward, counted one by one on the CPU."""
    model = MODELS["llama"]().to("vgpu")
    ids = tokens()
    out = model(input_ids=ids, use_cache=False)
    out.logits.sum().backward()
    on_card = torch.vgpu.memory_stats()["requested_bytes.all.current"] - 2 * 8_519_680
    vgpu_bytes = sum(t.numel() * t.itemsize for p in model.parameters() for t in (p, p.grad) if t is not None)
    buffers = sum(b.numel() * b.itemsize for b in {id(b): b for b in model.buffers()}.values())
    assert on_card == vgpu_bytes + buffers + out.logits.numel() * 4 + ids.numel() * 8
