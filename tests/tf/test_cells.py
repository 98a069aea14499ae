"""TensorFlow cells as the command line runs them, emulated on the processor with the card's allocator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bench import cli
from bench.record import Record, Status
from bench.runner import Outcome
from bench.targets import find_target

MIB, GIB = 2**20, 2**30
CARD = find_target("rtx4090")

Stock = Callable[..., Record]
Run = Callable[..., Outcome]


def test_the_published_system_needs_megabytes(stock: Stock) -> None:
    record = stock()
    assert (record.status, record.gradient, record.unit) == (Status.OK, "exact", "transitions")
    assert record.parameter_counts == {"critic.first": 18_561, "critic.second": 18_561, "policy.steps": 25_665}
    assert record.static_tensor_bytes["parameters"] == 4 * 62_787
    # RMSProp has one moment; Keras adds the number of steps and the learning rate to each optimizer.
    assert record.static_tensor_bytes["optimizer"] == 4 * 62_787 + 2 * (8 + 4)
    assert record.first is not None
    assert record.steady is not None
    assert 5 * MIB < record.steady.allocated_bytes < 15 * MIB
    assert record.steady.allocated_bytes <= record.steady.reserved_bytes < 32 * MIB  # growth: 2 + 8 MiB
    assert record.steady.process_bytes == record.steady.reserved_bytes + (CARD.outside_bytes or 0)
    assert record.timing is None  # the processor's is not the card's
    assert record.traces == 1


@pytest.mark.parametrize(
    ("words", "least_bytes", "most_bytes"),
    [
        # grab: the card less TensorFlow's reserve of 1,536 MiB for compute capability 8.9
        (["technique.allocation=grab"], CARD.memory_bytes - 1536 * MIB - MIB, CARD.memory_bytes - 1536 * MIB),
        (["technique.allocation=2"], 2 * GIB + (CARD.outside_bytes or 0), 2 * GIB + (CARD.outside_bytes or 0)),
        (["technique.beside=jax"], int(0.75 * CARD.memory_bytes), int(0.75 * CARD.memory_bytes) + GIB),
    ],
    ids=["grab", "limit", "jax"],
)
def test_the_policy_decides_what_the_process_holds(
    stock: Stock, words: list[str], least_bytes: int, most_bytes: int
) -> None:
    record = stock(*words)
    assert record.status is Status.OK
    assert record.steady is not None
    assert record.steady.allocated_bytes < 15 * MIB
    assert record.steady.process_bytes is not None
    assert least_bytes <= record.steady.process_bytes <= most_bytes


def test_a_limit_too_low_is_tensorflows_own_error_and_a_row(stock: Stock) -> None:
    record = stock("technique.allocation=0.005")  # 5 MiB
    assert record.status is Status.OOM
    assert record.reason is not None
    assert record.reason.startswith("Out of memory while trying to allocate")
    assert record.first is not None
    assert 0 < record.first.allocated_bytes <= record.first.reserved_bytes <= 5 * MIB


def test_without_xla_an_operators_allocation_fails(stock: Stock) -> None:
    record = stock("technique.allocation=0.005", "technique.xla=false")
    assert record.status is Status.OOM
    assert record.reason is not None
    assert record.reason.startswith("OOM when allocating tensor with shape[")


def test_techniques_change_what_lives(stock: Stock) -> None:
    plain, recomputed, accumulated, wide = (
        stock("technique.xla=false", *words)
        for words in (
            [],
            ["technique.checkpointing=on"],
            ["technique.accumulation=4"],
            ["workload.critic_width=512", "technique.sharing=separate"],
        )
    )
    peaks = []
    for record in (plain, recomputed, accumulated, wide):
        assert record.status is Status.OK, record.reason
        assert record.steady is not None
        peaks.append(record.steady.allocated_bytes)
    assert peaks[1] < 0.7 * peaks[0]
    assert peaks[2] < 0.7 * peaks[0]
    assert peaks[3] > 2 * peaks[0]
    assert accumulated.traces == 2  # one for the gradients, one for the update
    assert (recomputed.gradient, wide.gradient) == ("rounding", "changes training")  # XLA is the baseline


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_is_told_to_be_an_upper_bound(stock: Stock, precision: str) -> None:
    record = stock(f"technique.precision={precision}", "technique.clip=1")
    assert record.status is Status.OK, record.reason
    assert any("an upper bound" in note for note in record.notes)


def test_a_step_that_is_traced_every_time_is_flagged(run: Run) -> None:
    steady, growing = (
        run(f"workload.path=tf_workloads:{name}", "steps.memory=4").record for name in ("Steady", "Growing")
    )
    assert (steady.status, steady.traces) == (Status.OK, 1)
    assert (growing.status, growing.traces) == (Status.OK, 4)
    assert not any("RETRACES" in note for note in steady.notes)
    assert any("RETRACES: TensorFlow traces the step anew every time (4 traces" in note for note in growing.notes)


def test_micro_batches_that_are_missing_are_told(run: Run) -> None:
    record = run("workload.path=tf_workloads:Short", "technique.accumulation=2").record
    assert record.status is Status.CRASH
    assert "1 micro-batches instead of 2" in (record.reason or "")


def test_tensorboard_shows_memory_by_phase_and_step_of_both_frameworks(run: Run, tmp_path: Path) -> None:
    for framework in ("torch", "tensorflow"):
        outcome = run("workload=maddpg_hopper", "workload.preset=tiny", f"framework={framework}", "tensorboard=board")
        assert outcome.record.status is Status.OK
        [folder] = (tmp_path / "board").glob(f"maddpg_hopper-tiny-{framework}-rtx4090-*")
        board = EventAccumulator(str(folder))
        board.Reload()
        tags = set(board.Tags()["scalars"])
        phases = {"gradients", "update", "policy step"} if framework == "torch" else {"batch", "train"}
        assert {f"allocated_gib/{phase}" for phase in phases} | {"peak_allocated_gib"} <= tags
        peaks = [(event.step, event.value) for event in board.Scalars("peak_allocated_gib")]
        assert outcome.record.first is not None
        assert outcome.record.steady is not None
        told = [outcome.record.first.allocated_bytes / GIB, outcome.record.steady.allocated_bytes / GIB]
        assert peaks == [(step, pytest.approx(value, rel=1e-6)) for step, value in enumerate(told)]


def test_the_profile_of_every_part_is_kept_where_asked(run: Run, tmp_path: Path) -> None:
    assert run("workload.path=tf_workloads:Steady", "profile=seen").record.status is Status.OK
    assert {path.relative_to(tmp_path / "seen").parts[0] for path in (tmp_path / "seen").rglob("*.xplane.pb")} == {
        "build",
        "step_0",
        "step_1",
    }


def test_one_table_compares_the_frameworks(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("workload=maddpg_hopper", "workload.preset=tiny", "framework=torch,tensorflow", "target=rtx4090")
    assert cli.main(["run", "-m", *words]) == 0
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert {"torch: baseline", "tensorflow: baseline"} <= rows.keys()
    assert "predicted" in rows["torch: baseline"]
    assert "emulated" in rows["tensorflow: baseline"]
    assert out.count("Emulated with TensorFlow's allocator on the CPU and predicted on a virtual GPU") == 1
