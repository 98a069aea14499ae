"""Optimizers: CUDA's choice of loops, what they keep and what they take meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from card_figures import parameter_blocks
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

import bench.vgpu as vgpu

# States of each parameter's size, and the most that the foreach loop holds beside them, in sizes of the parameters.
KINDS: dict[type[torch.optim.Optimizer], int] = {
    torch.optim.SGD: 0,
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.Adagrad: 1,
    torch.optim.Adadelta: 2,
    torch.optim.Adamax: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 2,
    torch.optim.ASGD: 1,
}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).to("vgpu")


def stepped(kind: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """A network after its second step, and what that step took at its peak beside what was there."""
    model = network()
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(2):
        model(torch.rand(4, 256, device="vgpu")).sum().backward()
        before = torch.vgpu.memory_allocated()
        torch.vgpu.reset_peak_memory_stats()
        optimizer.step()
        peak_bytes = torch.vgpu.max_memory_allocated() - before
        optimizer.zero_grad()
    return model, optimizer, peak_bytes


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.dim())


@pytest.mark.parametrize("kind", KINDS)
class TestDefaults:
    def test_loop_is_foreach(self, card: vgpu.Device, kind: Any) -> None:
        model = network()
        assert _default_to_fused_or_foreach(list(model.parameters()), False, use_fused=False) == (False, True)
        assert stepped(kind)[2] == stepped(kind, foreach=True)[2]

    def test_all_loops_end_in_the_same_states(self, card: vgpu.Device, kind: Any) -> None:
        options = [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if kind in FUSED else [])]
        held = []
        for option in options:
            model, optimizer, _ = stepped(kind, **option)
            assert state_bytes(optimizer) == KINDS[kind] * parameter_blocks(model)
            held.append(state_bytes(optimizer))
        assert len(set(held)) == 1

    def test_one_by_one_takes_less_than_foreach(self, card: vgpu.Device, kind: Any) -> None:
        single, foreach = (stepped(kind, foreach=foreach)[2] for foreach in (False, True))
        assert single <= foreach
        if kind is not torch.optim.SGD:
            assert single < foreach


@pytest.mark.parametrize("kind", FUSED)
def test_fused_takes_nothing(card: vgpu.Device, kind: Any) -> None:
    # Adagrad keeps its step counter; the others keep one for each parameter on the card.
    assert stepped(kind, fused=True)[2] <= 4 * 512


def test_foreach_adam_holds_one_size_of_the_parameters(card: vgpu.Device) -> None:
    """The roots, which become the denominators in place (torch/optim/adam.py, _multi_tensor_adam)."""
    model, _, peak_bytes = stepped(torch.optim.Adam, foreach=True)
    assert peak_bytes == parameter_blocks(model)


def test_single_adam_holds_temporaries_of_one_parameter(card: vgpu.Device) -> None:
    # The root and the quotient, beside the denominator of the parameter before, which still has its name.
    assert stepped(torch.optim.Adam, foreach=False)[2] == 3 * 256 * 256 * 4


def test_weight_decay_and_momentum(card: vgpu.Device) -> None:
    model, optimizer, _ = stepped(torch.optim.SGD, momentum=0.9)
    assert state_bytes(optimizer) == parameter_blocks(model)
    assert stepped(torch.optim.SGD, weight_decay=0.1, foreach=True)[2] == parameter_blocks(model)
    assert stepped(torch.optim.SGD, weight_decay=0.1, foreach=False)[2] == 256 * 256 * 4


def test_amsgrad_keeps_one_more(card: vgpu.Device) -> None:
    model, optimizer, _ = stepped(torch.optim.Adam, amsgrad=True)
    assert state_bytes(optimizer) == 3 * parameter_blocks(model)


def test_capturable_counts_on_the_card(card: vgpu.Device) -> None:
    _, optimizer, _ = stepped(torch.optim.Adam, capturable=True)
    assert {state["step"].device.type for state in optimizer.state.values()} == {"vgpu"}
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(card: vgpu.Device, set_to_none: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.rand(4, 256, device="vgpu")).sum().backward()
    held = torch.vgpu.memory_allocated()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert torch.vgpu.memory_allocated() == held - set_to_none * parameter_blocks(model)


def test_learning_rate_as_a_tensor_and_schedules(card: vgpu.Device) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, device="vgpu"), capturable=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.rand(4, 256, device="vgpu")).sum().backward()
    optimizer.step()
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


def test_parameter_groups(card: vgpu.Device) -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model(torch.rand(4, 256, device="vgpu")).sum().backward()
    optimizer.step()
    assert state_bytes(optimizer) == 2 * parameter_blocks(model)


@pytest.mark.parametrize(
    "clip",
    [nn.utils.clip_grad_norm_, lambda p, m: nn.utils.clip_grad_norm_(p, m, foreach=False)],
    ids=["foreach", "single"],
)
def test_clipping_scales_in_place(card: vgpu.Device, clip: Callable[..., Any]) -> None:
    model = network()
    model(torch.rand(4, 256, device="vgpu")).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before = torch.vgpu.memory_allocated()
    torch.vgpu.reset_peak_memory_stats()
    clip(model.parameters(), 1.0)
    assert torch.vgpu.max_memory_allocated() - before < 64 * 512
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
