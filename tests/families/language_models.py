"""Small language models of transformers, from configurations alone, without dropout, and their training runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from live_bytes import Family, adamw
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, GROUPS = 64, 32, 64, 2, 4, 2
HEAD = WIDTH // HEADS

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": GROUPS}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def _gpt2(**options: Any) -> nn.Module:
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **_ENDS, **options))


def _t5(**options: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": HEAD, "d_ff": INNER, "num_layers": 1}
    config = T5Config(**sizes, num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0, **options)
    return T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "bert": lambda dropout=0.0, **options: BertForMaskedLM(
        BertConfig(**SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0, **options)
    ),
    "gpt2": _gpt2,
    "llama": lambda **options: LlamaForCausalLM(LlamaConfig(**GROUPED, **options)),
    "qwen3": lambda **options: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=HEAD, **options)),
    "t5": _t5,
}


def language_model(
    model: Callable[[], nn.Module], batch: int, length: int, cached: bool = True, **options: Any
) -> Family:
    """A model that predicts its own tokens; `cached`: it would keep keys and values, which training turns off."""
    arguments = {"use_cache": False} if cached else {}
    return Family(
        model=lambda: model().train(),
        batch=lambda device: (torch.zeros(batch, length, dtype=torch.long, device=device),),
        loss=lambda model, ids: model(input_ids=ids, labels=ids, **arguments).loss,
        optimizer=adamw,
        **options,
    )
