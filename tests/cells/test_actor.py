"""The FSDP actor step on 2 x 4 H100, as reference figures of the verl setting have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.cell import run_cell
from bench.config import Cell
from bench.record import Record, Status

MakeCell = Callable[..., Cell]
GIB = 2**30


def run(cell: MakeCell, **techniques: Any) -> Record:
    record = run_cell(cell("fsdp_transformer", "qwen3_4b", "h100_2x4", **techniques))
    assert record.status is Status.OK, record.reason
    return record


def peak_gib(record: Record) -> float:
    assert record.steady is not None
    return record.steady.allocated_bytes / GIB


def test_static_state_and_plain_peak(cell: MakeCell) -> None:
    record = run(cell)
    static = record.static_tensor_bytes
    state = static["parameters"] + static["gradients"] + static["optimizer"]
    # 4,022,468,096 parameters x 16 bytes over 8 ranks is 7.49 GiB
    assert state / GIB == pytest.approx(7.49, abs=0.01)
    assert static["optimizer"] == 2 * static["gradients"]
    assert 34 < peak_gib(record) < 40


def test_checkpointing_reshard_and_offload_move_the_peak(cell: MakeCell) -> None:
    checkpointed = run(cell, checkpointing="on")
    kept = run(cell, checkpointing="on", reshard=False)
    offloaded = run(cell, checkpointing="on", offload="parameters")
    assert peak_gib(checkpointed) == pytest.approx(13.4, abs=0.5)
    # All bf16 weights stay gathered from forward to backward: 7.49 GiB less what one unit takes anyway.
    assert peak_gib(kept) - peak_gib(checkpointed) == pytest.approx(7.4, abs=0.2)
    assert peak_gib(offloaded) == pytest.approx(7.8, abs=0.3)
    assert offloaded.static_tensor_bytes["parameters"] < 0.01 * GIB
