"""The whole of `oombench bench 4090`: cells, time, host memory at most. Goal: 45 cells, 8 minutes, 6 GB."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pytest_benchmark.fixture import BenchmarkFixture


def unique_bytes(process: psutil.Process) -> int:
    """Memory of a process and its children, pages that they share counted once (proportional set size)."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def run_bench(store: Path) -> int:
    """Run the bench; the highest host memory of all its processes, in bytes."""
    command = [sys.executable, "-m", "bench", "bench", "4090", f"store={store}", "--limit-memory", "6"]
    peak_bytes = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as bench:
        while bench.poll() is None:
            peak_bytes = max(peak_bytes, unique_bytes(psutil.Process(bench.pid)))
            time.sleep(0.5)
        assert bench.returncode == 0
    return peak_bytes


def test_bench_4090(benchmark: BenchmarkFixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "rtx4090" / "cells.jsonl"
    peak_bytes = benchmark.pedantic(run_bench, args=(store,), rounds=1)
    records = [json.loads(line) for line in store.read_text().splitlines()]
    assert len(records) >= 45
    assert {record["status"] for record in records} <= {"ok", "oom"}
    seconds = benchmark.stats.stats.total if benchmark.stats else float("nan")
    benchmark.extra_info |= {"cells": len(records), "peak_gb": round(peak_bytes / 1e9, 2)}
    with capsys.disabled():
        print(
            f"\nbench-4090: {len(records)} cells in {seconds:.0f} s, {peak_bytes / 1e9:.2f} GB of host memory at most"
        )
