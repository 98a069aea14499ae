"""The device module: every function that torch.cuda has and the design promises, with CUDA's signature and meaning."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch

import bench.vgpu as vgpu

PROMISED = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "memory_stats",
    "memory_snapshot",
    "mem_get_info",
    "empty_cache",
    "synchronize",
    "current_stream",
    "stream",
    "get_device_properties",
    "get_device_name",
    "device_count",
)
BESIDES = (
    "current_device",
    "default_stream",
    "device",
    "get_device_capability",
    "get_rng_state",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "reset_accumulated_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_stream",
)
ALLOCATED = 4096 + 512


def positional(function: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", PROMISED + BESIDES)
def test_function_takes_what_cudas_takes(name: str) -> None:
    module = torch.get_device_module("vgpu")
    own, theirs = getattr(module, name), getattr(torch.cuda, name)
    if isinstance(theirs, type):
        theirs = theirs.__init__
        expected = positional(theirs)[1:]
    else:
        expected = positional(theirs)
    for mine, cudas in zip(positional(own), expected, strict=True):
        assert mine.name == cudas.name
        assert (mine.default is mine.empty) == (cudas.default is cudas.empty)


@pytest.mark.parametrize("method", ["record", "wait", "query", "elapsed_time", "synchronize"])
def test_event_has_cudas_methods(method: str) -> None:
    own = positional(getattr(torch.vgpu.Event, method))
    assert [p.name for p in own] == [p.name for p in positional(getattr(torch.cuda.Event, method))]


@pytest.mark.parametrize(
    "method", ["wait_event", "wait_stream", "record_event", "query", "synchronize", "__enter__", "__exit__"]
)
def test_stream_has_cudas_methods(method: str) -> None:
    assert callable(getattr(torch.vgpu.Stream, method))


def test_modules_are_found_as_cudas_are(card: vgpu.Device) -> None:
    module = torch.get_device_module("vgpu")
    assert module is torch.vgpu
    assert module is torch.get_device_module(torch.device("vgpu", 0))
    assert module.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("vgpu")


def test_allocated_reserved_and_peaks(card: vgpu.Device) -> None:
    module = torch.vgpu
    kept = torch.empty(1024, device="vgpu")
    gone = torch.empty(1, device="vgpu")
    assert module.memory_allocated() == ALLOCATED
    assert module.memory_reserved() == module.max_memory_reserved() == 2 * 2**20
    del gone
    assert module.memory_allocated() == 4096
    assert module.max_memory_allocated() == ALLOCATED
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated() == 4096
    del kept
    assert module.memory_allocated("vgpu:0") == module.memory_allocated(torch.device("vgpu")) == 0


def test_empty_cache_gives_back_what_nothing_uses(card: vgpu.Device) -> None:
    module = torch.vgpu
    large = torch.empty(30 * 2**20, dtype=torch.uint8, device="vgpu")
    small = torch.empty(1, device="vgpu")
    del large
    assert module.memory_reserved() == 32 * 2**20
    module.empty_cache()
    assert module.memory_reserved() == 2 * 2**20
    del small
    module.empty_cache()
    assert module.memory_reserved() == 0
    assert module.max_memory_reserved() == 32 * 2**20


def test_free_memory_is_what_is_not_reserved(card: vgpu.Device) -> None:
    free, total = torch.vgpu.mem_get_info()
    assert total == card.target.memory_bytes == torch.vgpu.get_device_properties(0).total_memory
    assert free == total - card.target.outside_bytes
    kept = torch.empty(1, device="vgpu")
    assert torch.vgpu.mem_get_info()[0] == free - 2 * 2**20
    del kept


def test_statistics_have_cudas_keys(card: vgpu.Device) -> None:
    kept = torch.empty(1000, device="vgpu")
    stats = torch.vgpu.memory_stats()
    assert stats["allocated_bytes.all.current"] == 4096
    assert stats["requested_bytes.all.current"] == 4000
    assert stats["reserved_bytes.all.peak"] == 2 * 2**20
    assert stats["allocation.all.allocated"] == 1
    assert stats["num_ooms"] == 0
    del kept
    torch.vgpu.reset_accumulated_memory_stats()
    assert torch.vgpu.memory_stats()["allocation.all.freed"] == 0


def test_snapshot_lists_segments_with_their_blocks(card: vgpu.Device) -> None:
    kept = torch.empty(1000, device="vgpu")
    (segment,) = torch.vgpu.memory_snapshot()
    assert segment["total_size"] == 2 * 2**20
    assert segment["allocated_size"] == 4096
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    del kept


def test_memory_fraction_bounds_what_may_be_reserved(card: vgpu.Device) -> None:
    torch.vgpu.set_per_process_memory_fraction(0.5)
    torch.empty(11 * 2**30, dtype=torch.uint8, device="vgpu")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(12 * 2**30, dtype=torch.uint8, device="vgpu")


def test_properties(card: vgpu.Device) -> None:
    properties = torch.vgpu.get_device_properties()
    assert properties.name == torch.vgpu.get_device_name() == "NVIDIA GeForce RTX 4090"
    assert (properties.major, properties.minor) == torch.vgpu.get_device_capability() == (8, 9)
    assert properties.multi_processor_count == 128
    assert torch.vgpu.device_count() == 1
    assert torch.vgpu.current_device() == 0


def test_a_node_has_all_its_cards() -> None:
    with vgpu.virtual_gpu("h100_2x4"):
        assert torch.vgpu.device_count() == 4


@pytest.mark.parametrize(("target", "native"), [("rtx4090", True), ("v100_32", False), ("k80", False)])
def test_bfloat16_is_native_from_ampere_on(target: str, native: bool) -> None:
    with vgpu.virtual_gpu(target):
        assert torch.vgpu.is_bf16_supported(including_emulation=False) is native
        assert torch.vgpu.is_bf16_supported()


def test_seeds_reach_the_device(card: vgpu.Device) -> None:
    torch.manual_seed(7)
    assert torch.vgpu.initial_seed() == 7
    torch.vgpu.manual_seed_all(8)
    assert torch.vgpu.initial_seed() == 8
    state = torch.vgpu.get_rng_state()
    assert state.dtype is torch.uint8
    torch.vgpu.set_rng_state(state)
    with torch.random.fork_rng(device_type="vgpu"):
        torch.rand(3, device="vgpu")


def test_generators_of_the_device(card: vgpu.Device) -> None:
    generator = torch.Generator(device="vgpu").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert generator.device == torch.device("vgpu", 0)
    assert generator.initial_seed() == 3
    assert torch.rand(3, device="vgpu", generator=generator).device.type == "vgpu"
    assert sorted(torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()) == [0, 1, 2, 3, 4]


def test_device_contexts(card: vgpu.Device) -> None:
    with torch.vgpu.device(0):
        torch.vgpu.set_device(0)
        assert torch.empty(1, device="vgpu").device.index == 0


def test_accelerator_functions_are_the_modules(card: vgpu.Device) -> None:
    kept = torch.empty(1000, device="vgpu")
    assert torch.accelerator.memory_allocated() == torch.accelerator.max_memory_allocated() == 4096
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == 4096
    assert torch.accelerator.get_memory_info() == torch.vgpu.mem_get_info()
    del kept
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_reserved() == 0


def test_module_is_no_stand_in_for_cuda() -> None:
    assert not torch.cuda.is_available()
    assert isinstance(torch.cuda, types.ModuleType)
