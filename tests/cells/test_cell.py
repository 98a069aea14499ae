"""A cell: what it reports, that the columns add up, and that nothing around it changes its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.board import PEAK
from bench.cell import run_cell
from bench.config import Cell
from bench.record import Record, Status
from bench.vgpu.handlers import HANDLERS
from bench.vgpu.known import attach

FINITE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
MakeCell = Callable[..., Cell]
WORKLOADS = ("maddpg_hopper", "seq2seq_beam", "fsdp_transformer")


def without_provenance(record: Record) -> dict[str, object]:
    return {name: value for name, value in record.to_dict().items() if name != "provenance"}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_cell_gives_the_same_record(cell: MakeCell, workload: str) -> None:
    first = run_cell(cell(workload, "tiny", "rtx4090"))
    run_cell(cell(workload, "tiny", "h100", accumulation=2))  # a neighbour in between
    assert without_provenance(run_cell(cell(workload, "tiny", "rtx4090"))) == without_provenance(first)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    "techniques",
    [{}, {"accumulation": 2}, {"precision": "fp16"}, {"checkpointing": "on"}, {"offload": "activations+optimizer"}],
    ids=str,
)
def test_columns_add_up(cell: MakeCell, workload: str, techniques: dict[str, object]) -> None:
    record = run_cell(cell(workload, "tiny", "rtx4090", **techniques))
    assert record.status is Status.OK
    for peak in (record.first, record.steady):
        assert peak is not None
        assert sum(peak.categories.values()) == peak.allocated_bytes <= peak.reserved_bytes
        assert peak.process_bytes == peak.reserved_bytes + 466 * 2**20
        assert peak.categories["parameters"] > 0
        assert peak.categories["workspace"] == 2 * 8_519_680
    assert record.timing is not None
    assert sum(record.timing.bound_s.values()) == pytest.approx(record.timing.step_s, rel=0.02)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_clipping_saves_nothing(cell: MakeCell, workload: str) -> None:
    plain = run_cell(cell(workload, "tiny", "rtx4090"))
    clipped = run_cell(cell(workload, "tiny", "rtx4090", clip=1.0))
    assert plain.steady is not None
    assert clipped.steady is not None
    assert clipped.steady.allocated_bytes >= plain.steady.allocated_bytes


@pytest.mark.parametrize("workload", WORKLOADS)
def test_offloaded_optimizer_states_are_on_the_card_for_the_update_only(cell: MakeCell, workload: str) -> None:
    plain = run_cell(cell(workload, "tiny", "rtx4090", precision="fp32"))
    offloaded = run_cell(cell(workload, "tiny", "rtx4090", precision="fp32", offload="optimizer"))
    assert plain.static_tensor_bytes["optimizer"] > 0
    assert offloaded.static_tensor_bytes["optimizer"] == 0
    assert plain.static_bytes is not None
    assert offloaded.static_bytes is not None
    assert offloaded.static_bytes <= plain.static_bytes - plain.static_tensor_bytes["optimizer"]


@pytest.mark.parametrize("skipped", [1, 3, 20, 21])
def test_steps_whose_update_loss_scaling_skips_are_not_reported(
    cell: MakeCell, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    finite = HANDLERS[FINITE]

    def infinite_at_first(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> None:
        nonlocal asked
        asked += 1
        finite(mode, func, types, args, kwargs)
        if asked <= skipped:
            attach(args[1], torch.ones(1))

    plain = run_cell(cell("seq2seq_beam", "tiny", "rtx4090", precision="fp16"))
    monkeypatch.setitem(HANDLERS, FINITE, infinite_at_first)
    late = run_cell(cell("seq2seq_beam", "tiny", "rtx4090", precision="fp16"))
    assert plain.steady is not None
    assert late.steady is not None
    assert plain.steady.categories["optimizer"] > 0
    notes = [note for note in late.notes if "skipped" in note]
    if skipped <= 20:
        assert late.steady.categories == plain.steady.categories
        assert late.static_tensor_bytes == plain.static_tensor_bytes
        assert notes == [f"loss scaling skipped the update of {skipped} step{'s' * (skipped > 1)}, not reported"]
    else:
        assert notes == ["loss scaling skipped the update of 20 steps and more: figures may lack optimizer states"]
    assert not [note for note in plain.notes if "skipped" in note]


def test_what_a_workload_cannot_take_is_a_refused_record(cell: MakeCell) -> None:
    record = run_cell(cell("maddpg_hopper", "tiny", "rtx4090", sharding="fsdp"))
    assert record.status is Status.REFUSED
    assert record.reason == "MaddpgHopper cannot take sharding=fsdp: it has no shards()"


def test_a_model_too_large_for_the_card_is_parameters(cell: MakeCell) -> None:
    record = run_cell(cell("fsdp_transformer", "qwen3_4b", "k80"))
    assert record.status is Status.OOM
    assert record.first is not None
    assert record.first.categories["parameters"] == record.first.allocated_bytes > 10 * 2**30


def test_accumulation_divides_the_batch_that_the_techniques_make(cell: MakeCell) -> None:
    # The preset's batch of 8 has no 3 equal parts, the 12 asked for have.
    record = run_cell(cell("seq2seq_beam", "tiny", "rtx4090", batch_size=12, accumulation=3))
    assert (record.status, record.items_per_step) == (Status.OK, 12)


def test_tiny_presets_run_on_every_target(cell: MakeCell) -> None:
    for target in ("rtx4090", "h100", "h100_2x4", "a100_80", "v100_32", "k80"):
        record = run_cell(cell("fsdp_transformer", "tiny", target))
        assert record.status is Status.OK, record.reason
        assert record.steady is not None
        assert (record.steady.process_bytes is None) == (target == "a100_80")  # nobody published its context


def test_the_trace_follows_the_phases_of_the_memory_pass(cell: MakeCell) -> None:
    rows: list[tuple[int, str, int, int, int]] = []
    record = run_cell(cell("seq2seq_beam", "tiny", "rtx4090"), lambda *row: rows.append(row))
    steps = record.cell["settings"]["max_steps"]
    whole = [("gradients", 0), ("update", 0), (PEAK, 0)]
    told = [(step, *row) for step in (0, 1) for row in [*(("decoder step", call) for call in range(steps)), *whole]]
    assert [row[:3] for row in rows] == told
    assert all(allocated <= reserved for *_, allocated, reserved in rows)
    assert record.first is not None
    assert rows[len(told) // 2 - 1][3:] == (record.first.allocated_bytes, record.first.reserved_bytes)
