"""What the account of a step costs: the virtual GPU against a plain fake step, and upstream's tracker against the same.

All sides run the same FSDP2 update of the Qwen3 actor as rank 0 of 8 over a fake process group, in rounds that take
turns. A plain step is torch's FakeTensorMode on `device="vgpu"` without any account. Upstream's
torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker goes above a plain step; it follows tensors of any device (on
other than CUDA it does not round their sizes), and takes one iteration, so each round makes a new one. The causal mask
is passed as none at all and AdamW is the fused one: to do without, transformers and the foreach loop read values, which
plain fake tensors have not.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import bench.vgpu as vgpu
from bench.vgpu.device import Device, set_current
from bench.vgpu.patches import patched_torch
from workloads.fsdp_transformer import FsdpTransformer

TARGET = "h100_2x4"
LAYERS = {"4 layers": 4, "Qwen3-4B": 36}
ROUNDS = {"4 layers": 7, "Qwen3-4B": 1}


@contextmanager
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        yield init_device_mesh("vgpu", (8,))
    finally:
        dist.destroy_process_group()


@contextmanager
def tracked() -> Iterator[DeviceMesh]:
    with vgpu.virtual_gpu(TARGET), mesh() as ranks:
        yield ranks


@contextmanager
def plain() -> Iterator[DeviceMesh]:
    """Fake tensors on the card, with torch patched as the virtual GPU patches it and no account."""
    set_current(Device(vgpu.find_target(TARGET)))
    try:
        with (
            mesh() as ranks,
            patched_torch(nullcontext()),
            torch.autograd.set_multithreading_enabled(False),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield ranks
    finally:
        set_current(None)


class Update:
    """The actor's update, ready to run."""

    def __init__(self, layers: int, ranks: DeviceMesh) -> None:
        settings = dataclasses.replace(FsdpTransformer.presets["qwen3_4b"], layers=layers, batch_size=4)
        self.workload = FsdpTransformer(settings)
        actor: Any = self.workload.actor
        actor.forward = partial(actor.forward, attention_mask={"full_attention": None})
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for unit in self.workload.shards():
            fully_shard(unit, mesh=ranks, mp_policy=policy)
        self.workload.place(torch.device("vgpu", 0))
        self.optimizer = torch.optim.AdamW(actor.parameters(), fused=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        (batch,) = self.workload.micro_batches(1)
        (loss,) = self.workload.losses(batch)
        loss.backward()
        self.optimizer.step()


def seconds(side: Callable[[], AbstractContextManager[DeviceMesh]], layers: int, tracker: bool = False) -> float:
    """One step, after one that fills caches."""
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(), side() as ranks:
            warnings.simplefilter("ignore")
            update = Update(layers, ranks)
            update.step()
            with FSDPMemTracker(update.workload.actor, update.optimizer) if tracker else nullcontext():
                start = time.perf_counter()
                update.step()
                return time.perf_counter() - start
    finally:
        gc.enable()


SIDES: dict[str, Callable[[int], float]] = {
    "plain": lambda layers: seconds(plain, layers),
    "tracked": lambda layers: seconds(tracked, layers),
    "upstream": lambda layers: seconds(plain, layers, tracker=True),
}


@pytest.mark.parametrize("size", LAYERS)
def test_account_costs_little(benchmark: Any, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    taken: dict[str, list[float]] = {name: [] for name in SIDES}

    def turn() -> None:
        for name, side in SIDES.items():
            taken[name].append(side(LAYERS[size]))

    benchmark.pedantic(turn, rounds=ROUNDS[size])
    ratios = {
        name: statistics.median(a / b for a, b in zip(taken[name], taken["plain"], strict=True))
        for name in ("tracked", "upstream")
    }
    benchmark.extra_info.update({f"{name}_to_plain": round(ratio, 3) for name, ratio in ratios.items()})
    with capsys.disabled():
        print(
            f"\n{size}: plain fake step {statistics.median(taken['plain']):.3f} s, tracked {ratios['tracked']:.2f}x, "
            f"upstream's FSDPMemTracker {ratios['upstream']:.2f}x"
        )
    assert ratios["tracked"] < ratios["upstream"]
    assert ratios["tracked"] < 1.25
