"""Tests that need TensorFlow. It runs in processes of its own, as that of the tests may hold torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.record import Record
from bench.resolve import plan
from bench.runner import Options, Outcome, run_jobs

if importlib.util.find_spec("tensorflow") is None:
    collect_ignore_glob = ["test_*.py"]

RunCell = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunCell:
    """Run the cell that overrides describe, as the command line does."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.chdir(tmp_path)

    def run_cell(*words: str) -> Outcome:
        [outcome] = run_jobs([plan(["target=rtx4090", *words])], Options())
        return outcome

    return run_cell


@pytest.fixture
def stock(run: RunCell) -> Callable[..., Record]:
    """The record of the published system with some techniques."""

    def record(*words: str) -> Record:
        made = run("workload=maddpg_hopper", "framework=tensorflow", "workload.preset=stock", *words).record
        assert made.source == "emulated"
        return made

    return record
