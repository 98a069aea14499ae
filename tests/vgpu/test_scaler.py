"""torch.amp.GradScaler on the card: it finds no infinite gradient, says so, and keeps its own count of steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bench.vgpu as vgpu
from bench.vgpu import stand_ins

FINITE = "aten._amp_foreach_non_finite_check_and_unscale_.default"


def train(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, layer: nn.Module, clip: bool = False) -> None:
    optimizer.zero_grad()
    with torch.autocast("vgpu", torch.float16):
        loss = layer(torch.rand(4, 8, device="vgpu")).float().mean()
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_full_loop(card: vgpu.Device, kind: type[torch.optim.Optimizer], fused: bool, clip: bool) -> None:
    layer = nn.Linear(8, 8).to("vgpu")
    optimizer = kind(layer.parameters(), lr=0.1, fused=fused)  # type: ignore[call-arg]
    scaler = torch.amp.GradScaler("vgpu")
    for _ in range(3):
        train(scaler, optimizer, layer, clip)
    assert scaler.get_scale() == 65536.0
    assert set(card.stand_ins) <= {FINITE}
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert all(step.device.type == ("vgpu" if fused else "cpu") for step in steps)


def test_scale_grows_as_with_finite_gradients(card: vgpu.Device) -> None:
    layer = nn.Linear(8, 8).to("vgpu")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("vgpu", init_scale=8.0, growth_interval=2)
    scales = []
    for _ in range(4):
        train(scaler, optimizer, layer)
        scales.append(scaler.get_scale())
    assert scales == [8.0, 16.0, 16.0, 32.0]
    assert card.stand_ins == {FINITE: 4}


def test_never_skips_a_step(card: vgpu.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "PATIENCE", 3)
    parameter = nn.Parameter(torch.rand(3, device="vgpu"))
    optimizer = torch.optim.Adam([parameter])
    scaler = torch.amp.GradScaler("vgpu")
    for _ in range(10):
        scaler.scale((parameter * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[parameter]["step"].item() == 10


def test_state_is_saved_and_loaded(card: vgpu.Device) -> None:
    layer = nn.Linear(8, 8).to("vgpu")
    scaler = torch.amp.GradScaler("vgpu", init_scale=8.0)
    train(scaler, torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    state = scaler.state_dict()
    assert state["scale"] == 8.0
    other = torch.amp.GradScaler("vgpu")
    other.load_state_dict(state)
    assert other.get_scale() == 8.0


def test_disabled_does_nothing(card: vgpu.Device) -> None:
    layer = nn.Linear(8, 8).to("vgpu")
    scaler = torch.amp.GradScaler("vgpu", enabled=False)
    train(scaler, torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    assert not card.stand_ins
