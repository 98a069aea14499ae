from __future__ import annotations

import dataclasses
import json
import os
import platform
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from harness_tools import is_gone, job, outcomes, wait_for

from bench import host, runner
from bench.provenance import provenance
from bench.record import Record, Source, Status
from bench.worker import reason_of

GIB = 2**30


@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        ("oom", Status.OOM, "CUDA out of memory. Tried to allocate 944.00 MiB."),
        ("refused", Status.REFUSED, "Fake cannot take it"),
        ("raise", Status.CRASH, "RuntimeError: no such luck in here (fake_cells:"),
        ("library", Status.CRASH, "JSONDecodeError: Expecting property name"),
        ("unstorable", Status.CRASH, "TypeError: Object of type object is not JSON serializable"),
        ("exit", Status.CRASH, "the worker ended with status 3 before it reported"),
        ("SIGSEGV", Status.CRASH, "killed by SIGSEGV"),
        ("SIGKILL", Status.CRASH, "killed by SIGKILL: most likely the host ran out of memory"),
    ],
)
def test_whatever_a_cell_does_is_a_record_with_a_reason(ending: str, status: Status, reason: str) -> None:
    record = outcomes([job(f"workload.ending={ending}")])[ending].record
    assert record.status is status
    assert record.reason is not None
    assert record.reason.startswith(reason)
    assert "\n" not in record.reason
    assert record.key == job(f"workload.ending={ending}").cell.key


def test_a_crash_in_a_library_names_the_innermost_frame_of_ours() -> None:
    reason = outcomes([job("workload.ending=library")])["library"].record.reason
    assert reason is not None
    assert reason.endswith(" in _library)")


def test_a_frame_of_a_compiled_library_is_not_ours() -> None:
    with pytest.raises(ValueError, match="negative") as caught:
        np.random.default_rng(0).integers(5, size=-2)
    assert reason_of(caught.value).endswith(" in test_a_frame_of_a_compiled_library_is_not_ours)")


def test_a_cell_that_hangs_is_killed_and_its_neighbours_are_not() -> None:
    jobs = [job("workload.ending=hang", "timeout_s=0.5"), job(), job("workload.ending=oom")]
    found = outcomes(jobs, workers=2)
    assert found["hang"].record.status is Status.TIMEOUT
    assert found["hang"].record.reason == "no result within 0.5 s"
    assert found["ok"].record.status is Status.OK
    assert found["oom"].record.status is Status.OOM


def test_records_do_not_depend_on_order_or_neighbours() -> None:
    jobs = [job(f"workload.ending={ending}", "timeout_s=30") for ending in ("ok", "oom", "raise", "SIGSEGV")]
    alone = {ending: fixed(outcome.record) for ending, outcome in outcomes(jobs).items()}
    together = {ending: fixed(outcome.record) for ending, outcome in outcomes(jobs[::-1], workers=4).items()}
    assert alone == together


def test_results_come_in_the_order_of_completion() -> None:
    jobs = [job("workload.ending=hang", "timeout_s=2"), job()]
    assert list(outcomes(jobs, workers=2)) == ["ok", "hang"]


def test_closing_the_iterator_kills_what_is_running(place: Path) -> None:
    jobs = [job(), job("workload.ending=hang", f"workload.folder={place}")]
    with closing(runner.run_jobs(jobs, runner.Options(workers=2, run_cell=runner.RUN_CELL))) as results:
        next(results)
        wait_for(place)
    [started] = place.glob("started-*")
    assert is_gone(int(started.name.rpartition("-")[2]))


def test_what_a_cell_started_ends_with_it() -> None:
    [child] = outcomes([job("workload.ending=child")])["child"].record.notes
    assert is_gone(int(child))


def test_a_cell_computes_on_one_thread_a_measured_one_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes([job("workload.ending=threads")])["threads"].record.notes == ["1"]
    monkeypatch.setattr("bench.resolve.why_not_measured", lambda target, framework: None)
    measured = outcomes([job("workload.ending=threads", "source=measured")])["threads"].record
    assert measured.notes == [str(torch.get_num_threads())]


def test_measured_cells_come_first_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.resolve.why_not_measured", lambda target, framework: None)
    jobs = [job(), *(job("source=measured", f"technique.batch_size={size}") for size in (2, 4))]
    events: list[str] = []
    options = runner.Options(workers=3, run_cell=runner.RUN_CELL)
    for outcome in runner.run_jobs(jobs, options, lambda job: events.append(f"start {job.cell.source}")):
        events.append(f"end {outcome.job.cell.source}")
    assert events == ["start measured", "end measured"] * 2 + ["start predicted", "end predicted"]


def test_provenance_tells_versions_but_no_names_and_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cards", lambda: {"NVIDIA H100 80GB HBM3": "570.1"})
    facts = provenance(dataclasses.replace(job().cell, source=Source.MEASURED))
    assert {"oombench", "torch", "python", "os", "cpu", "commit", "dirty", "time", "cards"} <= facts.keys()
    assert facts["cards"] == [{"name": "NVIDIA H100 80GB HBM3", "driver": "570.1"}]
    assert "cards" not in provenance(job().cell)
    text = json.dumps(facts)
    assert platform.node() not in text.split('"')
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text


def test_provenance_is_in_every_record() -> None:
    assert outcomes([job()])["ok"].record.provenance["python"] == platform.python_version()


@pytest.mark.parametrize(
    ("jobs", "free_bytes", "limit_bytes", "expected"),
    [
        (None, 100 * GIB, None, len(os.sched_getaffinity(0))),
        (3, 100 * GIB, None, 3),
        (8, 4 * host.CELL_HOST_BYTES, None, 4),
        (8, 100 * GIB, 2 * host.CELL_HOST_BYTES, 2),
        (8, 2 * host.CELL_HOST_BYTES, 100 * GIB, 2),
        (8, 0, None, 1),
    ],
)
def test_as_many_workers_as_memory_allows(
    jobs: int | None, free_bytes: int, limit_bytes: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "free_memory_bytes", lambda: free_bytes)
    assert host.worker_count(jobs, limit_bytes) == expected


def test_page_cache_that_can_be_dropped_is_free_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**29 + 2**28}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {2**28}\n")
    assert host.free_memory_bytes(tmp_path) == 2**29
    (tmp_path / "memory.max").write_text("max\n")
    assert host.free_memory_bytes(tmp_path) > 2**29
    assert host.free_memory_bytes(tmp_path / "none") > 2**29


def test_free_memory_is_what_the_machine_has() -> None:
    assert 0 < host.free_memory_bytes() < 2**50


def fixed(record: Record) -> dict[str, object]:
    """A record without when and where it was made."""
    return {name: value for name, value in record.to_dict().items() if name != "provenance"}
