"""Training over a fake process group: FSDP2, DistributedDataParallel, collectives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from card_figures import parameter_blocks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import bench.vgpu as vgpu

WIDTH, DEPTH = 1024, 8
UNIT = WIDTH * WIDTH * 4
WORKSPACES = 2 * 33_554_432


@contextmanager
def group(size: int) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.fixture
def card() -> Iterator[vgpu.Device]:
    with vgpu.virtual_gpu("h100_2x4") as device, group(8):
        yield device


def network(place: str = "vgpu") -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).to(place)


def sharded(size: int, place: str = "vgpu", **options: Any) -> nn.Sequential:
    model = network(place)
    mesh = init_device_mesh("vgpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> int:
    """The peak of the last step beside the workspaces."""
    for _ in range(steps):
        torch.vgpu.reset_peak_memory_stats()
        model(torch.rand(16, WIDTH, device="vgpu")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.vgpu.max_memory_allocated() - WORKSPACES


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "kept": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("size", [8, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_fsdp_trains(size: int, options: dict[str, Any]) -> None:
    with vgpu.virtual_gpu("h100_2x4") as device, group(size):
        model = sharded(size, "cpu" if "offload_policy" in options else "vgpu", **options)
        assert isinstance(model, FSDPModule)
        optimizer = torch.optim.AdamW(model.parameters())
        first = train(model, optimizer, 1)
        assert train(model, optimizer) >= first - UNIT
        assert not device.stand_ins
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().shape == (WIDTH // size, WIDTH)
            place = "cpu" if "offload_policy" in options else "vgpu"
            assert parameter.to_local().device.type == place
            assert optimizer.state[parameter]["exp_avg"].to_local().device.type == place


def test_fsdp_shards_all_that_lasts(card: vgpu.Device) -> None:
    model = sharded(8)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    held = torch.vgpu.memory_allocated() - WORKSPACES
    assert 3 * DEPTH * UNIT / 8 <= held < 3 * DEPTH * UNIT / 8 + 2**20


def test_fsdp_gathers_a_unit_at_a_time_unless_told_to_keep_it() -> None:
    peaks = {}
    for name in ("plain", "kept", "mixed"):
        with vgpu.virtual_gpu("h100_2x4"), group(8):
            model = sharded(8, **OPTIONS[name])
            peaks[name] = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert peaks["plain"] < DEPTH * UNIT < peaks["kept"]
    assert peaks["mixed"] < peaks["plain"]


def test_fsdp_offload_leaves_no_parameters(card: vgpu.Device) -> None:
    model = sharded(8, "cpu", **OPTIONS["offload"])
    train(model, torch.optim.AdamW(model.parameters()))
    assert torch.vgpu.memory_allocated() - WORKSPACES < UNIT / 8
    assert card.clock.spent_s["transfer"] > 0


def test_fsdp_overlaps_gathers_with_work(card: vgpu.Device) -> None:
    model = sharded(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    assert {stream for stream in card.clock._lanes if stream}  # those of gathers and reductions


def test_fsdp_state_dict(card: vgpu.Device) -> None:
    model = sharded(8)
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    model.load_state_dict(state)


class TestDistributedDataParallel:
    @pytest.mark.parametrize("as_views", [False, True])
    def test_buckets_total_one_copy_of_the_parameters(self, card: vgpu.Device, as_views: bool) -> None:
        model = network()
        size = parameter_blocks(model)

        def requested() -> int:
            return torch.vgpu.memory_stats()["requested_bytes.all.current"]

        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
        assert requested() == 2 * size
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(3):
            wrapped(torch.rand(16, WIDTH, device="vgpu")).sum().backward()
            # Gradients are views of the buckets, or beside them.
            assert requested() - WORKSPACES == (2 if as_views else 3) * size
            optimizer.step()
            optimizer.zero_grad()
            assert requested() - WORKSPACES == 2 * size
        assert not card.stand_ins

    def test_reduces_as_many_bytes_as_there_are_parameters(
        self, card: vgpu.Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from bench.vgpu import mode

        reduced: list[int] = []
        charge = mode.VirtualMode._charge

        def count(self: Any, func: Any, args: Any, *rest: Any) -> None:
            if func is torch.ops.c10d.allreduce_.default:
                reduced.extend(tensor.numel() * tensor.itemsize for tensor in args[0])
            charge(self, func, args, *rest)

        monkeypatch.setattr(mode.VirtualMode, "_charge", count)
        wrapped = DistributedDataParallel(network(), bucket_cap_mb=5)
        for _ in range(2):
            reduced.clear()
            wrapped(torch.rand(16, WIDTH, device="vgpu")).sum().backward()
            assert sum(reduced) == DEPTH * UNIT
        assert len(reduced) > 1  # the first step has one bucket, later ones follow the order of the first

    def test_no_sync_and_hooks(self, card: vgpu.Device) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped = DistributedDataParallel(network())
        wrapped.register_comm_hook(None, fp16_compress_hook)
        with wrapped.no_sync():
            wrapped(torch.rand(16, WIDTH, device="vgpu")).sum().backward()
        wrapped(torch.rand(16, WIDTH, device="vgpu")).sum().backward()
        assert all(p.grad is not None for p in wrapped.parameters())

    def test_one_rank(self) -> None:
        with vgpu.virtual_gpu("h100"), group(1):
            wrapped = DistributedDataParallel(network())
            wrapped(torch.rand(16, WIDTH, device="vgpu")).sum().backward()


class TestCollectives:
    def test_run_and_take_time(self, card: vgpu.Device) -> None:
        x = torch.rand(8 * 2**20, device="vgpu")
        part = torch.rand(2**20, device="vgpu")
        calls = (
            lambda: dist.all_reduce(x),
            lambda: dist.broadcast(x, 0),
            lambda: dist.all_gather_single(x, part),
            lambda: dist.reduce_scatter_single(part, x),
            lambda: dist.all_gather(list(x.chunk(8)), part),
        )
        for call in calls:
            before = card.clock.spent_s["collective"]
            call()
            assert card.clock.spent_s["collective"] > before
        dist.barrier()

    def test_sums_keep_this_ranks_values(self, card: vgpu.Device) -> None:
        count = torch.tensor(5, device="vgpu")
        dist.broadcast(count, 0)
        assert not card.stand_ins
        dist.all_reduce(count)
        assert count.item() == 5
        assert card.stand_ins == {"c10d.allreduce_.default": 1}

    def test_what_others_send_is_not_known(self, card: vgpu.Device) -> None:
        gathered = [torch.ones(2, dtype=torch.long, device="vgpu") for _ in range(8)]
        dist.all_gather(gathered, torch.tensor([1, 2], device="vgpu"))
        assert gathered[1].tolist() == [0, 0]
        assert card.stand_ins == {"Tensor.tolist": 1}

    def test_work_has_a_result(self, card: vgpu.Device) -> None:
        x = torch.rand(3, device="vgpu")
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()
        (result,) = work.get_future().value()
        assert isinstance(result, Tensor)
