"""The `bert_large_*` rows: what nvidia-smi showed of a V100 that trained BERT-large with transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bench.validation.cards import card, setting
from bench.validation.older import autograd_of
from bench.validation.published import Published

LENGTH = 512

# Row -> sequences per forward, forwards per update, whether blocks are recomputed.
_ROWS: Mapping[str, tuple[int, int, bool]] = {
    "bert_large_bs4_fp32": (4, 1, False),
    "bert_large_bs1x4": (1, 4, False),
    "bert_large_bs1x4_ckpt": (1, 4, True),
}


class WalkingAdamW(torch.optim.Optimizer):
    """transformers' own AdamW, the Trainer's default then: in place, one parameter after the other."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, self.state[parameter])

    @staticmethod
    def _update(parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        if not state:
            state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        state["first"].mul_(0.9).add_(gradient, alpha=0.1)
        state["second"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        parameter.addcdiv_(state["first"], state["second"].sqrt().add_(1e-6), value=-5e-5)


def predict(row: Published) -> float:
    """Bytes that NVML shows: the context and what the allocator has reserved."""
    batch, micro_batches, recompute = _ROWS[row.id]
    where = setting(row)
    with where.virtual(), autograd_of(where.release):
        model = _model(recompute).to("vgpu")
        optimizer = WalkingAdamW(model.parameters())
        for _ in range(3):
            for _ in range(micro_batches):
                _forward_backward(model, batch, micro_batches)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert where.target.outside_bytes is not None
        return float(card().max_memory_reserved() + where.target.outside_bytes)


def _model(recompute: bool) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
        use_cache=False,
    )
    model = BertForSequenceClassification(config)
    model.train()
    if recompute:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": True})
    return model


def _forward_backward(model: Any, batch: int, micro_batches: int) -> None:
    tokens = torch.randint(30_000, (batch, LENGTH), device="vgpu")
    labels = torch.randint(2, (batch,), device="vgpu")
    mask = torch.ones(batch, LENGTH, device="vgpu")
    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    (loss / micro_batches).backward()
