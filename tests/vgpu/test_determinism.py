"""The same program gives the same bytes, addresses and seconds, whatever ran before."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bench.vgpu as vgpu


def program() -> dict[str, Any]:
    """All that the card tells after some steps of training."""
    gc.collect()
    gc.disable()
    try:
        with vgpu.virtual_gpu("rtx4090") as card:
            model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to("vgpu")
            norm = nn.LayerNorm(512).to("vgpu")
            optimizer = torch.optim.AdamW([*model.parameters(), *norm.parameters()])
            scaler = torch.amp.GradScaler("vgpu")
            side = torch.vgpu.Stream()
            for _ in range(3):
                optimizer.zero_grad()
                x = torch.rand(64, 512, device="vgpu")
                with side:
                    held = torch.rand(1000, device="vgpu").cpu()
                with torch.autocast("vgpu", torch.float16):
                    loss = norm(checkpoint(model, x, use_reentrant=False))[torch.rand(64, device="vgpu") > 0.5].sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.vgpu.synchronize()
            return {
                "stats": torch.vgpu.memory_stats(),
                "snapshot": torch.vgpu.memory_snapshot(),
                "seconds": card.clock.host_s,
                "spent": dict(card.clock.spent_s),
                "stand-ins": dict(card.stand_ins),
                "categories": card.memory.categories(),
                "held": held.shape,
            }
    finally:
        gc.enable()


def test_twice_in_one_process() -> None:
    first = program()
    with vgpu.virtual_gpu("h100"):
        torch.rand(1000, 1000, device="vgpu").sum().item()
    kept = [torch.rand(1000) for _ in range(100)]
    assert program() == first
    del kept
