from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from bench.record import Source, Status
from bench.report import table
from bench.report.frame import rows, tidy

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize("name", ["seq2seq", "both", "baseline_oom", "small"])
def test_golden(tables, golden, name):
    golden(f"{name}.md", table.markdown(tables[name]))
    golden(f"{name}.csv", table.csv(tables[name]))
    console = Console(width=200, file=io.StringIO(), color_system=None)
    console.print(table.terminal(tables[name]))
    golden(f"{name}.txt", "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (None, "—"),
        (0, "0 bytes"),
        (1, "1 bytes"),
        (1023, "1023 bytes"),
        (2 * KIB, "2.00 KiB"),
        (MIB, "1.00 MiB"),
        (int(0.0999 * GIB), "102.30 MiB"),
        (int(0.1001 * GIB), "0.10 GiB"),
        (944 * MIB, "0.92 GiB"),
        (1234 * GIB, "1,234.00 GiB"),
    ],
)
def test_bytes_text(number, expected):
    assert table.bytes_text(number) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "—"), (0.000_85, "0.850 ms"), (0.0123, "12.30 ms"), (1.31, "1,310.0 ms")],
)
def test_time_text(seconds, expected):
    assert table.time_text(seconds) == expected


@pytest.mark.parametrize(
    ("per_s", "expected"),
    [(None, "—"), (0.1234, "0.123 tokens/s"), (83.66, "83.7 tokens/s"), (83_660.4, "83,660 tokens/s")],
)
def test_rate_text(per_s, expected):
    assert table.rate_text(per_s, "tokens") == expected


def printed(frame):
    return {
        (row["configuration"], row["source"]): {name: text(row) for name, text in table.PRINTED.items()}
        for row in rows(frame)
    }


def test_clipping_saves_0_bytes(tables):
    assert printed(tables["seq2seq"])["clip=1", "predicted"]["saving"] == "0 bytes"


def test_more_memory_reads_as_a_cost(tables):
    assert printed(tables["seq2seq"])["reshard=off", "predicted"]["saving"] == "costs +1.50 GiB (7.0 %)"


def test_a_saving_is_never_rounded_to_nothing(record, baselines):
    frame = tidy([record(21.4, 600), record(21.4 - 300 / GIB, 600.0, clip=1.0)], baselines)
    assert printed(frame)["clip=1", "predicted"]["saving"] == "300 bytes (< 0.1 %)"
    assert printed(frame)["clip=1", "predicted"]["cost"] == "0.0 %"


def test_time_per_item_where_the_batch_differs(tables):
    assert printed(tables["seq2seq"])["batch_size=8", "predicted"]["cost"] == "−47.5 % (+4.9 % per item)"  # noqa: RUF001


def test_oom_baseline(tables):
    frame = tables["baseline_oom"]
    cells = printed(frame)
    assert cells["baseline", "predicted"]["allocated"] == "> 10.20 GiB"
    assert cells["baseline", "predicted"]["fits"] == (
        "no, OOM: tried to allocate 944.00 MiB by aten.add.Tensor at workloads/seq2seq_beam.py:120 in attend"
    )
    assert cells["accumulation=4", "predicted"]["saving"] == "fits now, ≥ 3.30 GiB"
    assert cells["checkpointing=on", "predicted"]["saving"] == "fits now"
    assert cells["accumulation=4", "predicted"]["cost"] == "n/a"
    assert cells["accumulation=2", "predicted"]["saving"] == "—"
    assert "**The baseline needs more than the card's 11.17 GiB**" in table.markdown(frame)


def test_baseline_without_a_result(record, baselines):
    failed = record(status=Status.CRASH, reason="RuntimeError: no")
    frame = tidy([failed, record(3, 50, clip=1.0)], baselines)
    assert printed(frame)["clip=1", "predicted"]["saving"] == "n/a"
    assert table.remarks(frame) == [
        "The baseline has no result, so savings and costs are not given; crash: RuntimeError: no."
    ]


def test_both_sources_are_labelled(tables):
    frame = tables["both"]
    lines = [line for line in table.markdown(frame).splitlines() if line.startswith("| precision=bf16 ")]
    assert ["measured" in line for line in lines] == [True, False]
    assert ["predicted" in line for line in lines] == [False, True]
    assert table.lead(frame).startswith(
        "Measured on the card and predicted on a virtual GPU (the source column tells which): seq2seq_beam on rtx4090"
    )


def test_a_missing_baseline_is_told_by_source(record, baselines):
    frame = tidy([record(9, 50), record(3, 50, source=Source.MEASURED, clip=1.0)], baselines)
    assert table.remarks(frame) == ["Measured: There is no baseline row, so savings and costs are not given."]


def test_emulated_rows_are_labelled_and_need_no_time(record, baselines):
    found = [record(9, 50), record(8, source=Source.EMULATED), record(3, source=Source.EMULATED, clip=1.0)]
    frame = tidy(found, baselines)
    assert table.lead(frame).startswith(
        "Emulated with TensorFlow's allocator on the CPU and predicted on a virtual GPU"
    )
    assert [row["source"] for row in rows(frame)] == ["emulated", "predicted", "emulated"]
    cells = printed(frame)["clip=1", "emulated"]
    assert (cells["saving"], cells["step time"], cells["cost"]) == ("5.00 GiB (62.5 %)", "—", "n/a")


def test_markup_is_printed_as_it_is(record, baselines):
    frame = tidy([record(status=Status.CRASH, reason="[red]no", notes=["[bold]x"])], baselines)
    console = Console(width=200, file=io.StringIO(), color_system=None)
    console.print(table.terminal(frame))
    assert "crash: [red]no" in console.file.getvalue()
    assert "[bold]x" in console.file.getvalue()


def test_nothing_allocated_by_the_baseline(record, baselines):
    frame = tidy([record(0, 50), record(1, 50, clip=1.0)], baselines)
    assert printed(frame)["clip=1", "predicted"]["saving"] == "costs +1.00 GiB"


def test_notes_once(tables):
    told = table.notes(tables["seq2seq"])
    assert told == [
        "Beam bookkeeping is not timed (baseline, precision=bf16)",
        "3 stand-in answers of .item(): the control flow of the optimizer depends on one (precision=bf16)",
    ]


def test_note_of_all_and_of_many(record, baselines):
    frame = tidy([record(9, 50, clip=float(i), notes=["all", *["many"] * (i > 1)]) for i in range(1, 7)], baselines)
    assert table.notes(frame) == ["all", "many (5 of 6 rows)"]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, "no, OOM"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", "no, OOM: tried to allocate 2.00 GiB"),
        ("failed to extend the arena", "no, OOM: failed to extend the arena"),
        ("word " * 40, "no, OOM: " + "word " * 23 + "…"),
    ],
)
def test_reasons_are_shortened(record, baselines, reason, expected):
    (row,) = rows(tidy([record(9, status=Status.OOM, reason=reason)], baselines))
    assert table.outcome_text(row) == expected


def test_oom_in_a_later_step(record, baselines):
    first, steady = record(8).first, record(9).first
    frame = tidy([record(status=Status.OOM, reason="no", first=first, steady=steady)], baselines)
    cells = printed(frame)["baseline", "predicted"]
    assert (cells["first"], cells["steady"], cells["allocated"]) == ("7.76 GiB", "> 8.73 GiB", "> 8.73 GiB")


def test_pipes_do_not_break_the_table(tables):
    page = table.markdown(tables["seq2seq"])
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_csv_is_bytes_and_seconds(tables):
    (first, *_) = csv.DictReader(io.StringIO(table.csv(tables["seq2seq"])))
    assert int(first["allocated_bytes"]) == int(21.4 * GIB)
    assert float(first["step_s"]) == 0.612
