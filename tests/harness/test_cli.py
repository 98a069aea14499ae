from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cells import OOM
from harness_tools import Command, is_gone, start, wait_for

from bench.provenance import code
from bench.resolve import plan
from bench.targets import TARGETS

FAKE = "workload.path=fake_cells:Fake"
STORE = Path("cells.jsonl")


def stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in STORE.read_text().splitlines()]


def test_run_prints_every_figure_and_stores_one_line(oombench: Command) -> None:
    answer = oombench("run", FAKE, "store=cells.jsonl", "technique.batch_size=4")
    text = "\n".join(answer.out)
    assert (answer.status, answer.err) == (0, [])
    assert answer.out[:2] == ["fake_cells/normal batch_size=4 @ rtx4090", "ok (predicted)"]
    for figure in ("1.000 GiB", "2.000 GiB", "3.000 GiB", "activations", "50.0%", "250.000 ms", "32.0 samples/s"):
        assert figure in text
    [record] = stored()
    assert (record["status"], record["cell"]["techniques"]["batch_size"]) == ("ok", 4)


def test_run_stores_below_results_by_default(oombench: Command) -> None:
    assert oombench("run", FAKE, "target=k80").status == 0
    assert Path("results/k80/cells.jsonl").exists()


@pytest.mark.parametrize(("ending", "status"), [("oom", 0), ("refused", 2), ("raise", 1), ("SIGSEGV", 1)])
def test_the_exit_status_of_run_tells_how_it_ended(ending: str, status: int, oombench: Command) -> None:
    answer = oombench("run", FAKE, "store=cells.jsonl", f"workload.ending={ending}")
    assert answer.status == status
    assert stored()[0]["status"] == answer.out[1].partition(" ")[0]


def test_the_whole_reason_of_an_oom_is_printed_in_a_line(oombench: Command) -> None:
    assert OOM in oombench("run", FAKE, "store=cells.jsonl", "workload.ending=oom").out


def test_run_traces_the_calls_of_the_phases(oombench: Command) -> None:
    out = oombench("run", FAKE, "store=cells.jsonl", "--trace").out
    assert [line.split() for line in out[1:3]] == [
        ["0", "encode", "0", "1.00", "2.00"],
        ["0", "decode", "1", "3.00", "4.00"],
    ]
    assert out[0].split() == ["step", "phase", "call", "allocated", "MiB", "reserved", "MiB"]


def test_a_trace_without_a_phase_is_one_line(oombench: Command) -> None:
    out = oombench("run", FAKE, "store=cells.jsonl", "workload.ending=oom", "--trace").out
    assert out[0] == "no trace: the cell ended before there was anything to tell"
    assert out[1] == "fake_cells/normal ending=oom @ rtx4090"


def test_multirun_runs_the_product_and_resumes(oombench: Command) -> None:
    words = (
        "run",
        "-m",
        FAKE,
        "store=cells.jsonl",
        "workload.ending=ok,oom,raise",
        "technique.clip=1,2",
        "--jobs",
        "2",
    )
    first = oombench(*words)
    assert first.status == 1  # two crashed
    assert first.out[-1] == "6 cells: ok 2 oom 2 refused 0 crash 2; cells.jsonl"
    again = oombench(*words)
    assert again.out[-1] == "6 cells: ok 2 oom 2 refused 0 crash 2, 6 of them from before; cells.jsonl"
    rows = [line for line in again.out if line.startswith("│ ")]
    assert sum("yes (" in row for row in rows) == 2  # the table of all six, from before or not
    retried = oombench(*words, "--retry")
    assert retried.out[-1] == "6 cells: ok 2 oom 2 refused 0 crash 2, 4 of them from before; cells.jsonl"
    assert len(stored()) == 8
    assert oombench(*words, "--rerun").out[-1] == "6 cells: ok 2 oom 2 refused 0 crash 2; cells.jsonl"
    assert len(stored()) == 14


def test_a_refused_cell_is_a_row_of_a_sweep(oombench: Command) -> None:
    answer = oombench("run", "-m", FAKE, "store=cells.jsonl", "workload.ending=refused,ok")
    assert answer.status == 0
    assert [record["reason"] for record in stored() if record["status"] == "refused"] == ["Fake cannot take it"]


def test_a_refused_technique_ends_a_single_run_before_it_begins(oombench: Command, place: Path) -> None:
    answer = oombench("run", FAKE, "technique.checkpointing=on")
    assert (answer.status, answer.out) == (2, [])
    assert answer.err == ["oombench: Fake cannot take checkpointing=on: it has no blocks()"]
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("run", FAKE, "tecnique.precision=bf16"),
        ("run", FAKE, "technique.accumulation=3"),
        ("run", "-m", FAKE, "technique.accumulation=1,3"),
        ("run", "-m", FAKE, "--trace"),
        ("run", FAKE, "--jbs", "2"),
        ("run", FAKE, "--jobs", "0"),
        ("sweep", "smok"),
        ("sweep", "smoke", "targt=k80"),
        ("bench", "rtx409"),
        ("bench", "local"),
        ("report",),
        ("report", "nowhere"),
        ("swep",),
    ],
)
def test_a_wrong_word_is_one_line_status_2_and_nothing_written(
    words: tuple[str, ...], oombench: Command, place: Path
) -> None:
    answer = oombench(*words)
    assert (answer.status, answer.out) == (2, [])
    [line] = answer.err
    assert line.startswith("oombench: ")
    assert not list(place.iterdir())


def test_damaged_lines_are_told_and_resuming_works(oombench: Command) -> None:
    words = ("run", "-m", FAKE, "store=cells.jsonl", "technique.clip=1,2")
    oombench(*words)
    with STORE.open("a") as file:
        file.write('{"key": "to')
    answer = oombench(*words, "technique.batch_size=2")
    assert answer.err == ["cells.jsonl:3: skipped: not JSON: Unterminated string starting at: line 1 column 9 (char 8)"]
    assert len(STORE.read_text().splitlines()) == 5


def test_the_tables_of_names(oombench: Command) -> None:
    assert [line.split()[0] for line in oombench("targets").out][:2] == ["rtx4090", "h100"]
    assert [line.split()[:2] for line in oombench("workloads").out] == [
        ["fsdp_transformer", "torch"],
        ["maddpg_hopper", "torch"],
        ["maddpg_hopper", "tensorflow"],
        ["seq2seq_beam", "torch"],
    ]
    told = oombench("techniques").out
    of_tensorflow = told.index("in tensorflow:")
    assert {"precision", "offload"} <= {line.split()[0] for line in told[:of_tensorflow]}
    assert {"precision", "allocation"} <= {line.split()[0] for line in told[of_tensorflow:]}


def test_report_hands_over_records_baselines_and_capacities(oombench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def publish(records: Any, folder: Path, **context: Any) -> list[Path]:
        given.update(context, records=records, folder=folder)
        return [folder / "page.md"]

    monkeypatch.setattr("bench.report.publish.publish", publish)
    oombench("run", "-m", FAKE, "target=k80,h100")
    answer = oombench("report")
    assert (answer.status, answer.out) == (0, ["results/page.md"])
    assert given["folder"] == Path("results")
    assert [record.cell["target"] for record in given["records"]] == ["h100", "k80"]
    assert given["capacities"].keys() == {"h100", "k80"}
    assert given["baselines"]["fake_cells:Fake"]["precision"] == "bf16"
    assert oombench("report", "results/k80", "--into", "elsewhere").out == ["elsewhere/page.md"]
    assert len(given["records"]) == 1
    Path("mine.jsonl").write_bytes(Path("results/k80/cells.jsonl").read_bytes())
    assert oombench("report", "mine.jsonl").out == ["page.md"]


def test_report_skips_what_is_gone_and_says_so(oombench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    monkeypatch.setattr("bench.report.publish.publish", lambda records, *_, **__: published.extend(records) or [])
    oombench("run", "-m", FAKE, "store=cells.jsonl", "technique.clip=1,2,3,4")
    lines = stored()
    known = ", ".join(TARGETS)
    lines[0]["cell"]["workload"] = lines[1]["cell"]["workload"] = "gone:Away"
    lines[2]["cell"]["target"] = "rtx409"
    STORE.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = oombench("report", "cells.jsonl")
    assert answer.status == 0
    assert answer.err == [
        f"cells.jsonl: skipped 1 record: unknown target 'rtx409': did you mean 'rtx4090'? known: {known}",
        "cells.jsonl: skipped 2 records: no workload at 'gone:Away': No module named 'gone'",
    ]
    assert [record.key for record in published] == [lines[3]["key"]]

    STORE.write_text(json.dumps(lines[0]) + "\n")
    answer = oombench("report", "cells.jsonl")
    assert (answer.status, answer.err[-1]) == (2, "oombench: no records in cells.jsonl that can be published")


def test_bench_publishes_its_own_cells_and_report_all(oombench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    monkeypatch.setattr("bench.report.publish.publish", lambda records, *_, **__: published.extend(records) or [])
    jobs = [plan([FAKE, "store=cells.jsonl", f"technique.clip={clip}"]) for clip in (1, 2)]
    monkeypatch.setattr("bench.card.bench_jobs", lambda card, overrides: ("said", jobs))
    oombench("run", "-m", FAKE, "store=cells.jsonl", "technique.clip=1,3")
    measured, left = sorted(stored(), key=lambda record: record["cell"]["techniques"]["clip"])
    measured.update(source="measured", key="measured", cell={**measured["cell"], "source": "measured"})
    measured["cell"]["steps"] = {"memory": 2, "warmup": 3, "timed": 10}
    other = {**measured, "key": "other", "cell": {**measured["cell"], "preset": "tiny"}}
    with STORE.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in (measured, other))
    assert oombench("bench", "4090").status == 0
    ours = {jobs[0].cell.key, jobs[1].cell.key, "measured"}
    assert {record.key for record in published} == ours
    published.clear()
    oombench("report", "cells.jsonl")
    assert {record.key for record in published} == {*ours, "other", left["key"]}


def test_a_place_that_cannot_be_published_to_is_one_line(oombench: Command, place: Path) -> None:
    oombench("run", FAKE, "store=cells.jsonl")
    (place / "file").touch()
    answer = oombench("report", "cells.jsonl", "--into", "file")
    assert (answer.status, answer.err) == (1, ["oombench: cannot write file/rtx4090: Not a directory"])


def test_bench_says_first_where_its_numbers_come_from(
    oombench: Command, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setattr("bench.report.publish.publish", lambda records, folder, **context: [])
    (place / "mine.yaml").write_text("card: k80\ncells: [{workload: 'fake_cells:Fake'}]")
    monkeypatch.setattr("bench.card.GENERAL", "mine.yaml")
    answer = oombench("bench", "k80")
    assert answer.status == 0
    assert answer.out[0].startswith("k80 is not measured: no Tesla K80 in this machine; predicting")


# From here on, in processes of their own.


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out.splitlines(), err.splitlines()


def test_ctrl_c_keeps_what_has_finished_and_the_same_command_resumes(place: Path) -> None:
    words = (
        "run",
        "-m",
        FAKE,
        "store=cells.jsonl",
        f"workload.folder={place}",
        "workload.ending=ok,hang once,oom",
        "-j",
        "1",
    )
    process = start(*words)
    wait_for(place, starts=2)
    os.killpg(process.pid, signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130
    assert err == ["oombench: interrupted: 1 of 3 cells are in cells.jsonl; the same command resumes"]
    assert out[0].startswith("[1/3] ok")
    assert [record["status"] for record in stored()] == ["ok"]
    assert all(is_gone(int(path.name.rpartition("-")[2])) for path in place.glob("started-*"))

    status, out, err = finish(start(*words))
    assert (status, err) == (0, [])
    assert out[-1] == "3 cells: ok 2 oom 1 refused 0, 1 of them from before; cells.jsonl"
    assert [record["status"] for record in stored()] == ["ok", "ok", "oom"]


def test_ctrl_c_in_a_single_run_is_one_line(place: Path) -> None:
    process = start("run", FAKE, "store=cells.jsonl", f"workload.folder={place}", "workload.ending=hang")
    wait_for(place)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process) == (130, [], ["oombench: interrupted"])


def test_a_disk_that_fills_up_ends_the_sweep_with_whole_lines(oombench: Command) -> None:
    words = (FAKE, "store=cells.jsonl", f"workload.name={'long ' * 1000}")
    oombench("run", *words)
    room_kib = STORE.stat().st_size * 5 // 2 // 1024  # for two lines and a part of the third
    STORE.unlink()
    process = start("run", "-m", *words, "technique.clip=1,2,3", "-j", "1", before=f"ulimit -f {room_kib}")
    status, _, err = finish(process)
    assert (status, err) == (1, ["oombench: cannot write cells.jsonl: File too large"])
    assert [record["status"] for record in stored()] == ["ok", "ok"]


def test_a_killed_sweep_leaves_no_worker(place: Path) -> None:
    process = start("run", FAKE, "store=cells.jsonl", f"workload.folder={place}", "workload.ending=hang")
    wait_for(place)
    process.kill()
    process.communicate()
    [started] = place.glob("started-*")
    assert is_gone(int(started.name.rpartition("-")[2]))


def test_help_and_wrong_words_are_answered_without_pytorch() -> None:
    code = "import sys; from bench.cli import main; sys.exit(main(sys.argv[1:]) + 10 * ('torch' in sys.modules))"
    for words, status in ((["--help"], 0), (["run", "workload=sek2seq"], 2), (["run", "tecnique.clip=1"], 2)):
        command = [sys.executable, "-c", code, *words]
        assert subprocess.run(command, capture_output=True).returncode == status


def test_what_other_code_has_run_is_run_again(oombench: Command) -> None:
    words = ("run", "-m", FAKE, "store=cells.jsonl", "technique.clip=1,2")
    assert oombench(*words).status == 0
    lines = Path("cells.jsonl").read_text().splitlines()
    old = json.loads(lines[0])
    old["provenance"]["code"] = "0" * 16
    Path("cells.jsonl").write_text("\n".join([json.dumps(old), lines[1]]) + "\n")
    assert oombench(*words).out[-1] == "2 cells: ok 2 oom 0 refused 0, 1 of them from before; cells.jsonl"
    assert [record["provenance"]["code"] for record in stored()] != ["0" * 16] * 3


def test_a_users_own_step_is_run_again_when_its_package_changes(oombench: Command, place: Path) -> None:
    (place / "mine").mkdir()
    (place / "mine" / "steps.py").write_text("from fake_cells import Fake")
    (place / "mine" / "model.py").write_text("width = 1")
    words = ("run", "-m", "workload.path=mine.steps:Fake", "store=cells.jsonl")
    for expected in ("; cells.jsonl", ", 1 of them from before; cells.jsonl"):
        assert oombench(*words).out[-1] == "1 cells: ok 1 oom 0 refused 0" + expected
    (place / "mine" / "model.py").write_text("width = 2")
    code.cache_clear()
    assert oombench(*words).out[-1] == "1 cells: ok 1 oom 0 refused 0; cells.jsonl"


def test_a_complete_bench_runs_again_and_an_interrupted_one_resumes(
    oombench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [plan([FAKE, "store=cells.jsonl", f"technique.clip={clip}"]) for clip in (1, 2, 3)]
    monkeypatch.setattr("bench.card.bench_jobs", lambda card, overrides: ("said", jobs))
    assert oombench("bench", "4090").status == 0
    lines = STORE.read_text().splitlines()
    assert oombench("bench", "4090").status == 0
    assert len(stored()) == 6
    STORE.write_text("\n".join(lines[:2]) + "\n")
    out = oombench("bench", "4090").out
    assert any("2 of them from before" in line for line in out), out
    assert len(stored()) == 3


def test_a_bench_interrupted_while_it_runs_again_resumes(oombench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [plan([FAKE, "store=cells.jsonl", f"technique.clip={clip}"]) for clip in (1, 2, 3)]
    monkeypatch.setattr("bench.card.bench_jobs", lambda card, overrides: ("said", jobs))
    for _ in range(2):
        assert oombench("bench", "4090").status == 0
    lines = STORE.read_text().splitlines()
    STORE.write_text("\n".join(lines[:4]) + "\n")
    out = oombench("bench", "4090").out
    assert any("1 of them from before" in line for line in out), out
    assert sorted(record["key"] for record in stored()) == sorted(2 * [job.cell.key for job in jobs])
    out = oombench("bench", "4090", "--rerun").out
    assert any("3 cells: ok 3 oom 0 refused 0; cells.jsonl" in line for line in out), out
