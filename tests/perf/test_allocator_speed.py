"""Events, an allocation or a free each, that the caching allocator replays per second."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.vgpu.allocator import Block, CachingAllocator

ROOT = Path(__file__).parents[2]
SHARED_TRACES = ROOT.parent / "shared" / "cases" / "allocator"
OWN_TRACES = ROOT / "tests" / "vgpu" / "traces"


def largest_trace() -> list[Any]:
    folder = SHARED_TRACES if SHARED_TRACES.is_dir() else OWN_TRACES
    traces = [json.loads(gzip.decompress(file.read_bytes()))["events"] for file in folder.glob("*.json.gz")]
    return max(traces, key=len)


def synthetic_trace(count: int = 20_000) -> list[Any]:
    """Sizes over five orders of magnitude, up to 300 alive, freed in random order: free lists are long here."""
    draw = random.Random(0)
    events: list[Any] = []
    live: list[int] = []
    for number in range(count):
        if len(live) < 300 and (not live or draw.random() < 0.5):
            events.append(["alloc", number, int(2 ** draw.uniform(9, 26)), draw.randrange(2)])
            live.append(number)
        else:
            events.append(["free", live.pop(draw.randrange(len(live)))])
    return events


def replay(events: list[Any]) -> None:
    memory = CachingAllocator(2**40)
    live: dict[int, Block] = {}
    for event in events:
        if event[0] == "alloc":
            live[event[1]] = memory.allocate(event[2], event[3])
        else:
            memory.free(live.pop(event[1]))


@pytest.mark.parametrize("trace", [largest_trace, synthetic_trace], ids=["recorded", "synthetic"])
def test_replay(benchmark: Any, trace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    events = trace()
    benchmark.pedantic(replay, args=(events,), rounds=20, warmup_rounds=2)
    rate = len(events) / benchmark.stats.stats.min
    benchmark.extra_info["events"] = len(events)
    benchmark.extra_info["events_per_s"] = round(rate)
    with capsys.disabled():
        print(f"\n{len(events):,} events, {rate:,.0f} events/s")
