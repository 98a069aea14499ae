"""What the tests of the harness share."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import runner
from bench.config import Job
from bench.resolve import plan

HERE = Path(__file__).parent


Command = Callable[..., "Answer"]


class Answer(NamedTuple):
    """What a command did: exit status, lines on stdout, lines on stderr."""

    status: int
    out: list[str]
    err: list[str]


def start(*arguments: str, before: str = "true") -> subprocess.Popen[str]:
    """The command line in a process and a process group of its own, after a command of the shell."""
    command = ["bash", "-c", f'{before} && exec "$@"', "bash", sys.executable, str(HERE / "driver.py"), *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_ctrl_c,
    )


def _heed_ctrl_c() -> None:
    """Undo what tests inherit that run in the background: a shell makes its background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def job(*overrides: str) -> Job:
    """A job of the fake workload."""
    return plan(["workload.path=fake_cells:Fake", "source=predicted", *overrides])


def outcomes(jobs: Sequence[Job], workers: int = 1) -> dict[str, runner.Outcome]:
    """What the runner makes of the jobs, by what the cell was told to do."""
    options = runner.Options(workers=workers, run_cell=runner.RUN_CELL)
    return {outcome.job.cell.settings["ending"]: outcome for outcome in runner.run_jobs(jobs, options)}


def wait_for(folder: Path, starts: int = 1) -> None:
    """Until so many cells have told that they run."""
    for _ in range(6000):
        if len(list(folder.glob("started-*"))) >= starts:
            return
        time.sleep(0.01)
    raise AssertionError(f"{starts} cells have not started within a minute")


def is_gone(pid: int) -> bool:
    """Whether a killed process ends; its zombie may be left for whoever started it."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False
