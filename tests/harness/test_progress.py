from __future__ import annotations

import dataclasses
import io

from harness_tools import job
from rich.console import Console

from bench.progress import SweepProgress
from bench.record import Peak, Record, Status, Timing
from bench.show import print_record

OK = job()
OOM = job("workload.ending=oom")


def record_of(status: Status, **facts: object) -> Record:
    cell = OK.cell
    return Record(key=cell.key, cell=cell.to_dict(), status=status, source=cell.source, **facts)  # type: ignore[arg-type]


def followed(terminal: bool) -> str:
    """What is printed while one cell fits and another does not."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, markup=False, highlight=False, color_system=None)
    with SweepProgress(2, console) as progress:
        progress.started(OK)
        progress.started(OOM)
        peak = Peak(allocated_bytes=2**30, reserved_bytes=2**29)
        progress.finished(OK, record_of(Status.OK, steady=peak, timing=Timing(0.001)))
        progress.finished(OOM, record_of(Status.OOM, reason="CUDA out of memory. [x]"))
    return file.getvalue()


FIGURES = "1.000 GiB allocated, 512.00 MiB reserved, 1.000 ms a step, predicted"
LINES = [
    f"[1/2] ok  fake_cells/normal baseline @ rtx4090: {FIGURES}",
    "[2/2] oom  fake_cells/normal ending=oom @ rtx4090: CUDA out of memory. [x]",
]


def test_elsewhere_than_on_a_terminal_there_is_a_line_a_cell_and_nothing_else() -> None:
    assert followed(terminal=False).splitlines() == LINES


def test_on_a_terminal_a_bar_counts_and_names_what_runs() -> None:
    text = followed(terminal=True)
    assert all(line in text for line in LINES)
    assert "2/2" in text
    assert "ok 1 oom 1 refused 0" in text


def test_a_record_without_figures_is_its_label_status_and_reason() -> None:
    file = io.StringIO()
    crash = dataclasses.replace(record_of(Status.CRASH, reason="killed by SIGSEGV"), notes=["[note]"])
    print_record(Console(file=file, markup=False, highlight=False), OK.label, crash)
    assert file.getvalue().splitlines() == [OK.label, "crash (predicted)", "killed by SIGSEGV", "note: [note]"]
