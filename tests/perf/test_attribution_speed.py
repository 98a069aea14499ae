"""What attribution and recording add to a step of Qwen3-4B on 8 ranks, and how fast a snapshot is read."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from bench.cell import _Run
from bench.device import open_card
from bench.plain_pickle import loads
from bench.resolve import plan
from bench.targets import find_target
from bench.vgpu.attribution import attributing
from bench.vgpu.device import current
from bench.vgpu.mode import VirtualMode

ROUNDS = 3


@contextmanager
def plain() -> Iterator[None]:
    """Fake tensors alone: operators run and cost the device nothing."""
    charge = VirtualMode._charge
    VirtualMode._charge = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        VirtualMode._charge = charge  # type: ignore[method-assign]


@contextmanager
def recorded() -> Iterator[None]:
    torch.vgpu.memory._record_memory_history()
    yield
    torch.vgpu.memory._record_memory_history(None)


KINDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain fake step": plain,
    "with memory and time": nullcontext,
    "with attribution": lambda: attributing(current()),
    "with attribution and history": recorded,
}


def test_a_step_with_attribution(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    words = ["workload=fsdp_transformer", "workload.preset=qwen3_4b", "target=h100_2x4", "source=predicted"]
    run = _Run(plan(words).cell, None)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with open_card(find_target(run.cell.target), run.cell.source) as card:
        trainer = run._build(card)
        for _ in range(2):
            trainer.step()
        for _ in range(ROUNDS):  # side by side: a machine is not equally fast all the time
            for kind, asked in KINDS.items():
                gc.collect()
                with asked():
                    start_s = time.perf_counter()
                    trainer.step()
                    seconds[kind].append(time.perf_counter() - start_s)
        with attributing(current()):
            benchmark.pedantic(trainer.step, rounds=1)
    least_s = {kind: min(times) for kind, times in seconds.items()}
    plain_s = least_s["plain fake step"]
    with capsys.disabled():
        for kind, each_s in least_s.items():
            print(f"\n{kind}: {each_s:.3f} s, {each_s / plain_s:.2f}x", end="")
    assert least_s["with attribution"] < 2 * plain_s


def test_a_snapshot_is_read(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    frames = [{"filename": f"file{number}.py", "line": number, "name": "forward"} for number in range(2000)]
    stacks = [[frames[(number + depth) % 2000] for depth in range(60)] for number in range(10_000)]
    events = [{"action": "alloc", "addr": 2**46 + i, "size": 512, "frames": stack} for i, stack in enumerate(stacks)]
    data = pickle.dumps(events, 4)
    benchmark.pedantic(loads, args=(data,), rounds=5)
    with capsys.disabled():
        print(f"\n{len(data) / benchmark.stats.stats.min / 1e6:.1f} MB/s of a snapshot", end="")
