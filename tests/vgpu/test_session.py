"""Enabling and disabling: contexts, nesting, and what is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.parallel.distributed as data_parallel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import optimizer
from torch.utils import _foreach_utils

import bench.vgpu as vgpu
from bench.vgpu import stand_ins


@pytest.fixture(autouse=True)
def disabled_after() -> Iterator[None]:
    yield
    vgpu.disable()


def patched() -> dict[str, Any]:
    """What a virtual GPU changes in torch."""
    state = {
        "swap_tensors": torch.utils.swap_tensors,
        "_apply": nn.Module._apply,
        "swap on conversion": torch.__future__.get_swap_module_params_on_conversion(),
        "sharding lock": ShardingPropagator._fake_mode_lock,
        "FakeTensor": torch._subclasses.FakeTensor,
        "foreach types": list(_foreach_utils._foreach_supported_types),
        "optimizer types": list(optimizer._foreach_supported_types),
        "deepcopy": FakeTensor.__deepcopy__,
        "tolist": FakeTensor.tolist,
        "numpy": FakeTensor.numpy,
        "data": "data" in vars(Tensor),
        "Generator": torch.Generator,
        "shapes": data_parallel._verify_param_shape_across_processes,
        "clear cache": torch.clear_autocast_cache,
        "resize_": torch.UntypedStorage.resize_,
        "engine": torch.autograd._engine_run_backward,
        "threads": torch.autograd.is_multithreading_enabled()
        if hasattr(torch.autograd, "is_multithreading_enabled")
        else torch._C._is_multithreading_enabled(),
        "mode": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE),
        "asked": dict(stand_ins._asked),
    }
    state |= {f"accelerator.{name}": getattr(torch.accelerator, name) for name in dir(torch.accelerator)}
    return state


def test_context_puts_everything_back() -> None:
    before = patched()
    with vgpu.virtual_gpu("rtx4090"):
        torch.rand(3, device="vgpu").sum().item()
        assert patched() != before
    assert patched() == before


def test_context_puts_everything_back_after_an_error() -> None:
    before = patched()
    with pytest.raises(ZeroDivisionError), vgpu.virtual_gpu("rtx4090"):
        raise ZeroDivisionError
    assert patched() == before
    with pytest.raises(RuntimeError, match="no virtual GPU is enabled"):
        vgpu.current()


def test_enable_and_disable_twice_in_a_row() -> None:
    before = patched()
    for target in ("rtx4090", "h100"):
        device = vgpu.enable(target)
        assert vgpu.current() is device
        assert torch.vgpu.get_device_name() == vgpu.find_target(target).title
        torch.empty(100, device="vgpu")
        vgpu.disable()
        assert patched() == before


def test_each_session_starts_empty() -> None:
    kept = []
    for _ in range(2):
        with vgpu.virtual_gpu("rtx4090"):
            assert torch.vgpu.memory_reserved() == torch.vgpu.max_memory_allocated() == 0
            kept.append(torch.empty(100, device="vgpu"))
            assert torch.vgpu.memory_allocated() == 512


def test_tensors_may_outlive_their_session() -> None:
    with vgpu.virtual_gpu("rtx4090") as device:
        tensor = torch.empty(100, device="vgpu")
    with vgpu.virtual_gpu("rtx4090"):
        del tensor
        assert torch.vgpu.memory_allocated() == 0
    assert device.memory.allocator.allocated_bytes == 0


def test_nesting_is_refused_and_leaves_the_outer_one() -> None:
    device = vgpu.enable("rtx4090")
    with pytest.raises(RuntimeError, match="a virtual rtx4090 is enabled already"):
        vgpu.enable("h100")
    with pytest.raises(RuntimeError, match="a virtual rtx4090 is enabled already"), vgpu.virtual_gpu("rtx4090"):
        pass
    assert vgpu.current() is device
    assert torch.empty(3, device="vgpu").device.type == "vgpu"


def test_disable_without_enable_does_nothing() -> None:
    vgpu.disable()
    vgpu.disable()


def test_unknown_target_changes_nothing() -> None:
    before = patched()
    with pytest.raises(ValueError, match="did you mean 'rtx4090'"):
        vgpu.enable("rtx4091")
    assert patched() == before


def test_real_work_is_as_ever_afterwards() -> None:
    with vgpu.virtual_gpu("rtx4090"):
        pass
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    assert type(model.weight.grad) is Tensor
    assert model.weight.grad.tolist() == [[2.0] * 4] * 4


def test_allocator_settings_come_from_the_environment_or_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserved(**options: Any) -> int:
        with vgpu.virtual_gpu("rtx4090", **options):
            held = torch.empty(3 * 2**20, dtype=torch.uint8, device="vgpu")
            assert held.is_contiguous()
            reserved_bytes: int = torch.vgpu.memory_reserved()
            return reserved_bytes

    assert reserved() == 20 * 2**20
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "large_segment_size_mb:40")
    assert reserved() == 40 * 2**20
    assert reserved(alloc_conf="") == 20 * 2**20
    with pytest.raises(ValueError, match="unknown"):
        reserved(alloc_conf="expandable_segment:True")
