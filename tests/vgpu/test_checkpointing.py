"""Recomputation and activations on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import bench.vgpu as vgpu

WIDTH, DEPTH, BATCH = 256, 6, 512
ACTIVATION = WIDTH * BATCH * 4


def network() -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH))
    return nn.Sequential(*blocks).to("vgpu")


def kept_and_peak(run: Callable[[nn.Sequential, Tensor], Tensor]) -> tuple[int, int]:
    """Bytes that a forward leaves for the backward, and the peak of both, beside what stood before; the second step."""
    model = network()
    x = torch.rand(BATCH, WIDTH, device="vgpu", requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        before = torch.vgpu.memory_allocated()
        torch.vgpu.reset_peak_memory_stats()
        loss = run(model, x).sum()
        kept = torch.vgpu.memory_allocated() - before
        loss.backward()
        del loss
    assert all(p.grad is not None for p in model.parameters())
    return kept, torch.vgpu.max_memory_allocated() - before


def plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def checkpointed(use_reentrant: bool) -> Callable[[nn.Sequential, Tensor], Tensor]:
    def run(model: nn.Sequential, x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return run


def on_host(pin_memory: bool) -> Callable[[nn.Sequential, Tensor], Tensor]:
    def run(model: nn.Sequential, x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=pin_memory, device_type="vgpu"):
            return model(x)  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_keep_one_input_for_each_block(card: vgpu.Device, use_reentrant: bool) -> None:
    full, checkpointed_run = kept_and_peak(plain), kept_and_peak(checkpointed(use_reentrant))
    # Of each block: the inputs of both layers and of the activation, less the one that the caller holds.
    assert full[0] == (3 * DEPTH - 1) * ACTIVATION + 512
    assert checkpointed_run[0] == (DEPTH - 1) * ACTIVATION + 512
    assert checkpointed_run[1] < full[1]


@pytest.mark.parametrize(("use_reentrant", "ratio"), [(True, 8 / 6), (False, 7 / 6)])
def test_checkpoints_cost_a_second_forward(use_reentrant: bool, ratio: float) -> None:
    """A block's two layers take 2 forward and 4 backward; the kind without reentry stops before the second layer."""
    seconds = {}
    for name, run in (("plain", plain), ("checkpointed", checkpointed(use_reentrant))):
        with vgpu.virtual_gpu("k80") as card:
            kept_and_peak(run)
            seconds[name] = card.clock.spent_s["compute"]
    assert seconds["checkpointed"] / seconds["plain"] == pytest.approx(ratio, rel=0.01)


def test_sequential(card: vgpu.Device) -> None:
    kept, _ = kept_and_peak(lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False))
    assert kept == 3 * DEPTH // 2 * ACTIVATION + 512  # the second half, whose input is the first one's output


def test_selective(card: vgpu.Device) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(model: nn.Sequential, x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(
                block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )
        return x

    kept, _ = kept_and_peak(run)
    assert (DEPTH - 1) * ACTIVATION < kept < (3 * DEPTH - 1) * ACTIVATION


@pytest.mark.parametrize("pin_memory", [True, False])
class TestOnHost:
    def test_nothing_is_kept_on_the_card(self, card: vgpu.Device, pin_memory: bool) -> None:
        kept, peak = kept_and_peak(on_host(pin_memory))
        assert kept == 512
        assert peak < kept_and_peak(plain)[1]

    def test_copies_cost_time_over_pcie(self, card: vgpu.Device, pin_memory: bool) -> None:
        kept_and_peak(on_host(pin_memory))
        moved = 2 * 2 * DEPTH * ACTIVATION  # there and back, twice, of the two layers' and the activation's inputs
        assert card.clock.spent_s["transfer"] * card.target.pcie_bytes_s > moved

    def test_nothing_is_made_up(self, card: vgpu.Device, pin_memory: bool) -> None:
        small = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to("vgpu")
        with save_on_cpu(pin_memory=pin_memory, device_type="vgpu"):
            loss = small(torch.rand(2, 4, device="vgpu")).sum()
        loss.backward()
        assert not card.stand_ins


def test_known_values_survive_the_host(card: vgpu.Device) -> None:
    weight = torch.rand(3, 4, device="vgpu", requires_grad=True)
    for pin_memory in (True, False):
        index = torch.tensor([0, 2], device="vgpu")
        with save_on_cpu(pin_memory=pin_memory, device_type="vgpu"):
            picked = weight[index]
        picked.sum().backward()
    assert not card.stand_ins


def test_saved_tensor_hooks(card: vgpu.Device) -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor.half())
        return len(kept) - 1

    x = torch.rand(BATCH, WIDTH, device="vgpu", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: kept[index].float()):
        y = x.exp().sin()
    y.sum().backward()
    assert len(kept) == 2
    assert x.grad is not None
