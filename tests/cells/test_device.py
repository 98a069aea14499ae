"""What is asked of a real card, answered by stand-ins of torch.cuda and NVML; what a virtual one leaves behind."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _random

from bench.device import Card, open_card
from bench.errors import BadInput
from bench.record import Source
from bench.targets import find_target

TITLES = ["NVIDIA A2", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with the cards `TITLES`; the ones that were made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(TITLES))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: TITLES[index])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-{device}"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    return current


def test_of_several_cards_the_targets_own_is_measured(cuda: list[int]) -> None:
    with open_card(find_target("rtx4090"), Source.MEASURED) as card:
        assert card.device == torch.device("cuda", 1)
        assert card.module is torch.cuda
    assert cuda == [1]


def test_another_card_is_not_measured_in_its_place(cuda: list[int]) -> None:
    with (
        pytest.raises(BadInput, match=r"PyTorch sees no Tesla K80, but NVIDIA A2, NVIDIA GeForce RTX 4090"),
        open_card(find_target("k80"), Source.MEASURED),
    ):
        raise AssertionError("a card was opened")
    assert cuda == []


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([], None),
        ([(os.getpid(), 5), (1, 7)], 5),
        ([(-1, 7)], 7),  # alone, under the number that it has outside its container
        ([(-1, 7), (-2, 8)], None),
        ([(os.getpid(), None)], None),  # a driver that does not tell
    ],
)
def test_process_memory_is_what_nvml_has_for_this_process(
    running: list[tuple[int, int | None]], expected: int | None, cuda: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    asked: list[str] = []

    def running_on(handle: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in running]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", asked.append)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", running_on)
    assert Card(torch.device("cuda", 1)).process_bytes(3) == expected
    assert asked == ["GPU-uuid-cuda:1"]


def test_a_virtual_card_leaves_no_group_and_no_random_state_of_tensors() -> None:
    with open_card(find_target("h100_2x4"), Source.PREDICTED) as card:
        assert dist.get_world_size() == 8
        mesh = dist.device_mesh.init_device_mesh("vgpu", (8,))
        drawn = torch.distributed.tensor.randn(8, 8, device_mesh=mesh)
        assert drawn.to_local().device == card.device
        assert _random._rng_tracker is not None
    assert not dist.is_initialized()
    assert _random._rng_tracker is None


def test_a_cell_does_not_hang_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with open_card(find_target("rtx4090"), Source.PREDICTED) as card:
        held = torch.empty(3 * 2**20, dtype=torch.uint8, device=card.device)
        assert held.is_contiguous()
        assert card.module.memory_reserved() == 20 * 2**20
        assert card.notes() == ["not used, as a cell's numbers hang on its configuration alone: PYTORCH_ALLOC_CONF"]
