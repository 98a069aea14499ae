"""What a sweep says while it runs: a live bar on a terminal, one line a cell elsewhere."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from bench.config import Job
from bench.record import Record, Status
from bench.show import one_line


class SweepProgress:
    """Follows the cells of a sweep; a context manager, so that the bar is gone afterwards."""

    def __init__(self, total: int, console: Console) -> None:
        self.counts: Counter[Status] = Counter()
        self._total = total
        self._console = console
        self._running: list[str] = []
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
            console=console,
            expand=True,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, counts="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, job: Job) -> None:
        """A cell has a process now."""
        self._running.append(job.label)
        self._refresh()

    def finished(self, job: Job, record: Record) -> None:
        """A cell's record is in the store."""
        self._running.remove(job.label)
        self.counts[record.status] += 1
        self._refresh()
        line = f"[{self.counts.total()}/{self._total}] {one_line(job.label, record)}"
        self._console.print(Text(line), soft_wrap=True)

    def _refresh(self) -> None:
        self._bar.update(
            self._task,
            completed=self.counts.total(),
            counts=counts_line(self.counts),
            description=", ".join(self._running),
        )


def counts_line(counts: Counter[Status]) -> str:
    """How many cells ended how, the usual outcomes always among them."""
    usual = (Status.OK, Status.OOM, Status.REFUSED)
    return " ".join(f"{status} {counts[status]}" for status in Status if status in usual or counts[status])
