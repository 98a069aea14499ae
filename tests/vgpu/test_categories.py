"""What memory is for: categories add up to the peak, whatever runs, and each holds what its name says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from card_figures import parameter_blocks
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import bench.vgpu as vgpu

WIDTH, BATCH, DEPTH = 256, 4096, 4
ACTIVATION = WIDTH * BATCH * 4


class Training:
    """A network in training, whose tensors are marked as a harness marks them."""

    def __init__(self, card: vgpu.Device, forward: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        self.card = card
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH))
        ).to("vgpu")
        card.memory.mark_all("parameters")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.forward = forward or (lambda model, x: model(x))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward(self.model, torch.rand(BATCH, WIDTH, device="vgpu")).sum().backward()
        self.card.memory.mark([p.grad for p in self.model.parameters() if p.grad is not None], "gradients")
        self.optimizer.step()
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        self.card.memory.mark(states, "optimizer")

    def peak(self) -> dict[str, int]:
        """Categories at the peak of the second step; they add up."""
        self.step()
        torch.vgpu.reset_peak_memory_stats()
        self.step()
        categories = self.card.memory.categories()
        assert tuple(categories) == vgpu.CATEGORIES
        assert sum(categories.values()) == torch.vgpu.max_memory_allocated()
        return categories


def recompute(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.children():
        x = checkpoint(block, x, use_reentrant=False)
    return x


def offload(model: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=True, device_type="vgpu"):
        return model(x)  # type: ignore[no-any-return]


def mixed(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("vgpu", torch.float16):
        return model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [None, recompute, offload, mixed])
def test_categories_add_up_to_the_peak(
    card: vgpu.Device, forward: Callable[[nn.Module, Tensor], Tensor] | None
) -> None:
    categories = Training(card, forward).peak()
    assert categories["workspace"] == 2 * 8_519_680


def test_each_holds_what_its_name_says(card: vgpu.Device) -> None:
    training = Training(card)
    size = parameter_blocks(training.model)
    categories = training.peak()
    assert categories["parameters"] == size
    assert categories["optimizer"] == 2 * size
    # The peak is where the last layer's backward begins: its gradients are there, and every activation.
    assert (
        3 * DEPTH * ACTIVATION <= categories["activations"] + categories["temporaries"] <= (3 * DEPTH + 3) * ACTIVATION
    )
    assert categories["activations"] >= 3 * DEPTH * ACTIVATION
    assert 0 < categories["gradients"] <= size


def test_recomputed_activations_are_activations(card: vgpu.Device) -> None:
    plain, recomputed = Training(card).peak(), Training(card, recompute).peak()
    # The inputs of all blocks, and what one block computes again.
    assert (DEPTH + 2) * ACTIVATION <= recomputed["activations"] <= (DEPTH + 5) * ACTIVATION
    assert recomputed["activations"] < plain["activations"]


def test_offloaded_activations_are_gone(card: vgpu.Device) -> None:
    assert Training(card, offload).peak()["activations"] < 5 * ACTIVATION


def test_without_gradients_all_is_temporary(card: vgpu.Device) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to("vgpu")
    card.memory.mark_all("parameters")
    torch.vgpu.reset_peak_memory_stats()
    with torch.no_grad():
        model(torch.rand(BATCH, WIDTH, device="vgpu"))
    categories = card.memory.categories()
    assert categories["activations"] == 0
    assert categories["temporaries"] >= 2 * ACTIVATION


def test_temporaries_of_a_forward_are_temporaries(card: vgpu.Device) -> None:
    x = torch.rand(BATCH, WIDTH, device="vgpu")
    torch.vgpu.reset_peak_memory_stats()
    y = (x * 2 + 1).sum()
    assert card.memory.categories()["temporaries"] == 2 * ACTIVATION
    del y


def test_live_bytes_are_what_tensors_asked_for(card: vgpu.Device) -> None:
    training = Training(card)
    training.step()
    live = card.memory.live_tensor_bytes()
    exact = sum(p.numel() * 4 for p in training.model.parameters())
    assert live["parameters"] == live["gradients"] == exact
    assert live["optimizer"] == 2 * exact
    assert live["activations"] == live["temporaries"] == 0
    assert sum(live.values()) == torch.vgpu.memory_stats()["requested_bytes.all.current"]


def test_marks_move_with_their_tensors(card: vgpu.Device) -> None:
    kept = torch.empty(1000, device="vgpu")
    view = kept[10:]
    card.memory.mark([view, torch.empty(3)], "optimizer")
    assert card.memory.live_tensor_bytes()["optimizer"] == 4000
    card.memory.mark([kept], "gradients")
    assert card.memory.live_tensor_bytes()["optimizer"] == 0


def test_refilled_storages_are_parameters(card: vgpu.Device) -> None:
    kept = torch.empty(1000, device="vgpu")
    kept.untyped_storage().resize_(0)
    kept.untyped_storage().resize_(4000)
    assert card.memory.live_tensor_bytes()["parameters"] == 4000


@pytest.fixture
def eager_collection() -> Iterator[None]:
    old = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*old)


def test_collection_at_any_moment_loses_nothing(card: vgpu.Device, eager_collection: None) -> None:
    for _ in range(50):
        holder: list[object] = [torch.empty(1000, device="vgpu")]
        holder.append(holder)
        del holder
        kept = torch.empty(2000, device="vgpu")
        assert sum(card.memory.categories().values()) == torch.vgpu.max_memory_allocated()
    gc.collect()
    del kept
    assert torch.vgpu.memory_allocated() == 0
