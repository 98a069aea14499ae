"""Cells of the suite, run in this process on the virtual GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from bench.config import Cell, Steps
from bench.techniques.table import TECHNIQUES
from bench.workload import load_workload

PATHS = {
    "maddpg_hopper": "workloads.maddpg_hopper:MaddpgHopper",
    "seq2seq_beam": "workloads.seq2seq_beam:Seq2SeqBeam",
    "fsdp_transformer": "workloads.fsdp_transformer:FsdpTransformer",
}


@pytest.fixture
def cell() -> Callable[..., Cell]:
    def make(
        workload: str,
        preset: str,
        target: str,
        settings: dict[str, Any] | None = None,
        steps: Steps | None = None,
        **techniques: Any,
    ) -> Cell:
        kind = load_workload(PATHS[workload])
        values = {name: technique.off for name, technique in TECHNIQUES.items()}
        return Cell(
            workload=PATHS[workload],
            preset=preset,
            settings={**dataclasses.asdict(kind.presets[preset]), **(settings or {})},
            techniques={**values, **kind.baseline, **techniques},
            target=target,
            steps=steps or Steps(),
        )

    return make
