"""Cells -> worker processes -> records, in the order in which they finish.

Every cell has a process of its own, forked from a server that has imported the heavy modules once: no cell sees another
one's memory, and each costs milliseconds to start. What a cell does to its process, its neighbours survive. Where the
framework does not survive a fork, the process is a fresh one.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from bench import board
from bench.config import Cell, Job
from bench.frameworks import find_framework
from bench.provenance import provenance
from bench.record import Record, Source, Status
from bench.worker import TraceRow, failure, work

RUN_CELL: str | None = None
"""What the command line has run every cell, by import path, in place of its framework's own function."""

EXIT_GRACE_S = 10.0
"""How long a worker that closed its connection may take to end by itself."""


@dataclass(frozen=True)
class Outcome:
    """A finished job: its record, and its trace rows if the job asks for them."""

    job: Job
    record: Record
    trace: list[TraceRow]


@dataclass(frozen=True)
class Options:
    """How to run jobs.

    Attributes:
        workers: Cells at once. A measured cell always has the machine to itself.
        quiet: Discard what cells print.
        run_cell: Import path of the function that runs a cell, if not the framework's own.
    """

    workers: int = 1
    quiet: bool = True
    run_cell: str | None = None

    def runs(self, job: Job) -> str:
        """Import path of the function that runs the cell of a job: the worker imports it, not we."""
        return self.run_cell or find_framework(job.cell.framework).run_cell


def run_jobs(
    jobs: Sequence[Job], options: Options, started: Callable[[Job], None] | None = None
) -> Generator[Outcome, None, None]:
    """Run every job, measured ones first and one by one; closing the iterator kills what is still running."""
    measured = [job for job in jobs if job.cell.source is Source.MEASURED]
    others = [job for job in jobs if job.cell.source is not Source.MEASURED]
    _start_server(jobs, options)
    for batch, workers in ((measured, 1), (others, options.workers)):
        yield from _run_batch(batch, workers, options, started or (lambda job: None))


def _run_batch(
    jobs: Sequence[Job], count: int, options: Options, started: Callable[[Job], None]
) -> Generator[Outcome, None, None]:
    waiting = deque(jobs)
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < count:
                job = waiting.popleft()
                running.append(_Worker(job, options))
                started(job)
            for worker in _wait(running):
                running.remove(worker)
                outcome = worker.outcome()
                if worker.job.tensorboard is not None:
                    board.write_scalars(worker.job.tensorboard / _run_name(worker.job.cell), outcome.trace)
                yield outcome
    finally:
        for worker in running:
            worker.kill()


def _run_name(cell: Cell) -> str:
    """What TensorBoard shows a cell as."""
    workload = cell.workload.partition(":")[0].rpartition(".")[2]
    return "-".join((workload, cell.preset, cell.framework, cell.target, cell.key))


def _wait(workers: Sequence[_Worker]) -> list[_Worker]:
    """Those of the workers that are done or overdue; at least one."""
    while True:
        remaining_s = min(worker.deadline_s for worker in workers) - time.monotonic()
        ready = wait([handle for worker in workers for handle in worker.handles], timeout=max(0.0, remaining_s))
        now_s = time.monotonic()
        done = [w for w in workers if w.deadline_s <= now_s or any(handle in ready for handle in w.handles)]
        if done:
            return done


class _Worker:
    """The process of one job."""

    def __init__(self, job: Job, options: Options) -> None:
        self.job = job
        preloaded = find_framework(job.cell.framework).preloaded
        context: BaseContext = multiprocessing.get_context("forkserver" if preloaded else "spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        traced = job.trace or job.tensorboard is not None
        asked = {name: value for name in ("explain", "profile") if (value := getattr(job, name))}
        arguments = (sender, options.runs(job), job.cell, asked, traced, options.quiet)
        self._process: BaseProcess = context.Process(target=work, args=arguments)  # type: ignore[attr-defined]
        self._process.start()  # returns once the process exists, so imports do not count against the timeout
        sender.close()
        self.deadline_s = time.monotonic() + job.timeout_s

    @property
    def handles(self) -> tuple[Connection, int]:
        """What becomes ready when the worker has reported, or has ended."""
        return self._receiver, self._process.sentinel

    def outcome(self) -> Outcome:
        """What the worker reported, or why it did not; its process is gone afterwards."""
        record, trace = self._report()
        self.kill()
        facts = provenance(self.job.cell) | record.provenance
        return Outcome(self.job, dataclasses.replace(record, provenance=facts), trace)

    def kill(self) -> None:
        """End the process and all that it started."""
        pid = self._process.pid
        if pid is not None and not wait([self._process.sentinel], timeout=0):  # alive, so its number is still its own
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._receiver.close()

    def _report(self) -> tuple[Record, list[TraceRow]]:
        if self._receiver.poll():
            try:
                received: tuple[Record, list[TraceRow]] = self._receiver.recv()
                return received
            except (EOFError, OSError):
                pass  # it died before its report, or amid it
        elif not wait([self._process.sentinel], timeout=0):
            reason = f"no result within {self.job.timeout_s:g} s"
            return failure(self.job.cell, Status.TIMEOUT, reason), []
        self._process.join(EXIT_GRACE_S)
        return failure(self.job.cell, Status.CRASH, _exit_reason(self._process.exitcode)), []


def _exit_reason(code: int | None) -> str:
    """Why a worker ended without a report, from its exit code."""
    if code is None:
        return "the worker closed its connection without a report"
    if code == -signal.SIGKILL:
        return "killed by SIGKILL: most likely the host ran out of memory"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"the worker ended with status {code} before it reported"


def _start_server(jobs: Sequence[Job], options: Options) -> None:
    """Start the process that imports once and that every worker is forked from; it may be running already."""
    forked = [job for job in jobs if find_framework(job.cell.framework).preloaded]
    if not forked:
        return
    modules = {path.partition(":")[0] for job in forked for path in (options.runs(job), job.cell.workload)}
    # A worker imports the main module again, as multiprocessing does; for the command line that is this one.
    modules |= {"bench.cli"} & sys.modules.keys()
    multiprocessing.set_forkserver_preload(sorted(modules))
    # A module that asks for torch.cuda.is_available() on import must not set CUDA up here: no fork could use it then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # It inherits what is blocked: Ctrl-C is for the parent alone, which ends the workers.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
