from __future__ import annotations

import dataclasses

import pytest

from bench.errors import BadInput
from bench.record import Peak, Source, Status
from bench.report.frame import COLUMNS, PARTS, label, rows, short_names, tidy

PLAIN = {"batch_size": None, "accumulation": 1, "precision": "fp32", "checkpointing": False, "clip": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "baseline"),
        ({"precision": "bf16"}, "precision=bf16"),
        ({"checkpointing": True, "accumulation": 4}, "accumulation=4 + checkpointing=on"),
        ({"clip": 0.5}, "clip=0.5"),
        ({"clip": 1.0}, "clip=1"),
        ({"new": "x"}, "new=x"),
    ],
)
def test_label_lists_what_differs(changes, expected):
    assert label(PLAIN | changes, PLAIN) == expected


def test_label_is_relative_to_the_workload():
    assert label(PLAIN, PLAIN | {"checkpointing": True, "batch_size": 8}) == "batch_size=off + checkpointing=off"


def test_label_of_a_record_older_than_a_technique():
    assert label({"precision": "fp32"}, PLAIN) == "baseline"


def test_a_record_older_than_a_technique_or_a_setting_gives_way_to_the_new_one(record, baselines):
    old, new = record(21.4, 612), record(12.5, 500)
    del old.cell["techniques"]["clip"]
    old.cell["settings"] = {"batch_size": 16, "beam": 64}
    (row,) = rows(tidy([old, new], baselines))
    assert row["steady_bytes"] == new.steady.allocated_bytes


def test_columns(tables):
    for table in tables.values():
        assert table.dtypes.astype(str).to_dict() == COLUMNS


def test_parts_sum_to_the_peak(tables):
    for table in tables.values():
        split = table[table["source"].eq("predicted") & table["allocated_bytes"].notna()]
        assert len(split)
        assert (split[[f"{part}_bytes" for part in PARTS]].sum(axis=1) == split["allocated_bytes"]).all()
    assert tables["both"].query("source == 'measured'")["activations_bytes"].isna().all()


def test_unknown_categories_are_other(record, baselines):
    peak = Peak(100, 100, categories={"activations": 60, "surprise": 30})
    (row,) = rows(tidy([record(first=peak)], baselines))
    assert row["other_bytes"] == 40
    with pytest.raises(BadInput, match="exceed its peak by 1 bytes"):
        tidy([record(first=dataclasses.replace(peak, categories={"activations": 101}))], baselines)


def test_the_higher_step_is_the_peak(record, baselines):
    first, steady = Peak(90, 120, 200), Peak(100, 110, None)
    (row,) = rows(tidy([record(first=first, steady=steady)], baselines))
    assert (row["allocated_bytes"], row["peak_step"]) == (100, "steady")
    assert (row["first_bytes"], row["steady_bytes"]) == (90, 100)
    assert (row["reserved_bytes"], row["process_bytes"]) == (120, 200)


def test_saving_and_cost_add_up(tables):
    found = rows(tables["seq2seq"])
    baseline = found[0]
    assert baseline["is_baseline"]
    for row in found[1:]:
        if row["status"] == Status.OK:
            assert row["allocated_bytes"] + row["saving_bytes"] == baseline["allocated_bytes"]
            assert row["step_s"] == pytest.approx(baseline["step_s"] * (1 + row["cost_share"]))
            assert row["items_per_s"] == pytest.approx(row["items_per_step"] / row["step_s"])


def test_each_source_has_its_own_baseline(tables):
    found = [row for row in rows(tables["both"]) if row["configuration"] == "accumulation=4"]
    assert [row["source"] for row in found] == ["measured", "predicted"]
    assert found[0]["saving_bytes"] == int(21.3 * 2**30) - int(6.8 * 2**30)
    assert found[1]["saving_bytes"] == int(21.4 * 2**30) - int(6.9 * 2**30)


def test_no_baseline_of_that_source(record, baselines):
    found = tidy([record(9, 50), record(3, 50, source=Source.MEASURED, clip=1.0)], baselines)
    (row,) = [row for row in rows(found) if row["source"] == "measured"]
    assert row["baseline_status"] is None
    assert row["saving_bytes"] is None


def test_order(tables):
    found = rows(tables["both"])
    assert [row["is_baseline"] for row in found[:3]] == [True, True, False]
    fitting = [row["allocated_bytes"] for row in found[2:] if row["status"] == "ok" and row["source"] == "predicted"]
    assert fitting == sorted(fitting)
    assert [row["status"] for row in found[-6:]] == ["oom", "oom", "oom", "timeout", "crash", "refused"]


def test_oom_baseline_bounds_the_saving(tables):
    found = {row["configuration"]: row for row in rows(tables["baseline_oom"])}
    assert found["accumulation=4"]["saving_bytes"] is None
    assert found["accumulation=4"]["saving_floor_bytes"] == int(10.2 * 2**30) - int(6.9 * 2**30)
    assert found["checkpointing=on"]["saving_floor_bytes"] == 0
    assert found["accumulation=4"]["cost_share"] is None


def test_the_last_record_counts(record, baselines):
    again = record(8, 60)
    again = dataclasses.replace(again, cell=again.cell | {"steps": {"memory": 3, "warmup": 0, "timed": 1}})
    (row,) = rows(tidy([record(9, 50), again], baselines))
    assert row["step_s"] == 0.06


def test_settings_that_differ_make_variants(record, baselines):
    found = tidy([record(9, 50), record(4, 50, settings={"batch_size": 16, "beam": 8})], baselines)
    assert [row["variant"] for row in rows(found)] == ["beam=64", "beam=8"]
    assert found["is_baseline"].all()


def test_unknown_workload(record):
    with pytest.raises(BadInput, match="no baseline techniques for workload 'workloads"):
        tidy([record(9, 50)], {})


def test_short_names():
    torch = dict.fromkeys(["a.b:C", "d:E", "x.d:E"], "torch")
    assert short_names(torch) == {"a.b:C": "b", "d:E": "d_E", "x.d:E": "x_d_E"}
    assert short_names({"a.b:C": "torch", "a.tf.b:C": "tensorflow"}) == {"a.b:C": "b", "a.tf.b:C": "b"}


def test_no_records(baselines):
    assert list(tidy([], baselines).columns) == list(COLUMNS)
