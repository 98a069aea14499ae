"""Sweeps: a file that crosses workloads, techniques and targets, and its execution, which resumes.

    card: rtx4090                       # the default target, and where `oombench bench` measures
    cells:
      - workload: seq2seq_beam
        preset: thread
        across:                         # every row below at each of these; any override will do
          technique.batch_size: [16, 2]
        each:                           # one technique at a time, a row a value
          precision: [bf16, fp16]
        together:                       # several techniques in a row; a list makes several rows
          - {precision: bf16, accumulation: [2, 4]}

The plain configuration is always a row.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bench.config import Job
from bench.errors import BadInput, OombenchError, unknown
from bench.overrides import names_in, word
from bench.progress import SweepProgress, counts_line
from bench.provenance import code
from bench.record import Record, Status
from bench.resolve import plan
from bench.runner import Options, run_jobs
from bench.store import Store, history_at, latest

AGAIN = (Status.CRASH, Status.TIMEOUT)
"""Outcomes that say nothing about the cell, so that it can be worth another try."""


class Interrupted(OombenchError):
    """Ctrl-C; what has finished is in the store."""

    exit_status = 130


@dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded.

    Attributes:
        name: Its name, without folder and suffix.
        card: The target that its cells have unless they say otherwise.
        rows: The overrides of each cell.
    """

    name: str
    card: str
    rows: list[list[str]]

    def jobs(self, overrides: Sequence[str] = ()) -> list[Job]:
        """One job a row, with `overrides` applied to all of them; none twice."""
        return distinct(plan([*row, *overrides]) for row in self.rows)


def distinct(jobs: Iterator[Job]) -> list[Job]:
    """The jobs without those that would repeat an earlier one."""
    return list({(job.cell.key, job.store): job for job in jobs}.values())


def load_sweep(name: str) -> Sweep:
    """The sweep of the group `sweep` called `name`, or the one in the file `name`.

    Raises:
        BadInput: There is no such sweep, or the file is not one.
    """
    known = names_in("sweep")
    if name in known:
        text = files("bench.conf").joinpath("sweep", f"{name}.yaml").read_text(encoding="utf-8")
    elif name.endswith((".yaml", ".yml")):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error  # its text names the file once more
            raise BadInput(f"cannot read sweep file {name}: {reason}") from error
    else:
        raise unknown("sweep", name, known)
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(f"sweep {name} is not YAML: {' '.join(str(error).split())}") from error
    tree = _checked(tree, "sweep key", {"card": str, "store": str, "cells": list}, name)
    if "card" not in tree or not tree.get("cells"):
        raise BadInput(f"sweep {name} lacks a card or cells")
    common = [word("target", tree["card"]), *([word("store", tree["store"])] if "store" in tree else [])]
    rows = [[*common, *row] for entry in tree["cells"] for row in _rows(entry, name)]
    return Sweep(Path(name).stem, tree["card"], rows)


def execute(
    jobs: Sequence[Job],
    options: Options,
    console: Console,
    *,
    retry: bool = False,
    rerun: bool = False,
    again: bool = False,
    finished: Callable[[], None] | None = None,
) -> Counter[Status]:
    """Run the jobs that their stores lack, and say on `console` how it goes.

    Args:
        jobs: What the sweep consists of.
        options: How to run them.
        console: For results; damaged lines of a store are reported on stderr.
        retry: Run those again that crashed or timed out.
        rerun: Run all of them again.
        again: Where none is lacking run all of them once more; interrupted, that resumes too.
        finished: Called when all have run, before the last line.

    Returns:
        How many cells ended how, those included that were in a store already.
    """
    if any(job.trace for job in jobs):
        raise BadInput("a trace follows a single cell: oombench run")
    stores = {job.store: Store(job.store) for job in jobs}
    held = {path: {} if rerun else _held(path) for path in stores}
    left, before = _split(jobs, [held[job.store].get(_identity(job)) for job in jobs], retry, again)
    places = ", ".join(str(path) for path in stores)
    for store in stores.values():
        store.prepare()
    progress = SweepProgress(len(left), console)
    try:
        with progress, closing(run_jobs(left, options, progress.started)) as outcomes:
            for outcome in outcomes:
                stores[outcome.job.store].append(outcome.record)
                progress.finished(outcome.job, outcome.record)
    except KeyboardInterrupt:
        done = len(jobs) - len(left) + progress.counts.total()
        then = "with --rerun it starts over" if rerun else "the same command resumes"
        line = f"interrupted: {done} of {len(jobs)} cells are in {places}; {then}"
        raise Interrupted(line) from None
    counts = progress.counts + before
    if finished is not None:
        finished()
    was_there = f", {before.total()} of them from before" if before else ""
    console.print(f"{counts.total()} cells: {counts_line(counts)}{was_there}; {places}", soft_wrap=True)
    return counts


@dataclass(frozen=True)
class _Held:
    """What a store has of a cell, run by this code: how it ended the last time, and how often it ran."""

    status: Status
    times: int


def _split(
    jobs: Sequence[Job], found: Sequence[_Held | None], retry: bool, again: bool
) -> tuple[list[Job], Counter[Status]]:
    """The jobs that are to run, and how the others ended.

    With `again` those run that have run least often: each once more in a whole store, the rest of them where such a
    round was interrupted.
    """
    fewest = min((held.times if held else 0 for held in found), default=0)
    left: list[Job] = []
    before: Counter[Status] = Counter()
    for job, held in zip(jobs, found, strict=True):
        if held is None or (retry and held.status in AGAIN) or (again and held.times == fewest):
            left.append(job)
        else:
            before[held.status] += 1
    return left, before


def _identity(job: Job) -> tuple[str, str]:
    """What has to be in a store for the job not to be run: its cell, by this very code."""
    return job.cell.key, code(job.cell.workload)


def _held(path: Path) -> dict[tuple[str, str], _Held]:
    """What a store has, by cell and code."""
    history = history_at(path)
    times = Counter(_ran(record) for record in history)
    return {_ran(record): _Held(record.status, times[_ran(record)]) for record in latest(history)}


def _ran(record: Record) -> tuple[str, str]:
    return record.key, str(record.provenance.get("code"))


def _rows(entry: Any, sweep: str) -> Iterator[list[str]]:
    """The overrides of every row that one entry of `cells` stands for."""
    kinds = {"workload": str, "preset": str, "across": dict, "each": dict, "together": list}
    entry = _checked(entry, "key of a sweep's cells", kinds, sweep)
    if "workload" not in entry:
        raise BadInput(f"sweep {sweep}: an entry of cells lacks its workload")
    start = [word("workload", entry["workload"])]
    start += [word("workload.preset", entry["preset"])] if "preset" in entry else []
    settings: list[list[str]] = [[]]
    settings += [[_technique(name, value)] for name, values in entry.get("each", {}).items() for value in _list(values)]
    for group in entry.get("together", []):
        if not isinstance(group, dict):
            raise BadInput(f"sweep {sweep}: {group!r} in together is not a mapping of techniques")
        settings += _cross({f"technique.{name}": value for name, value in group.items()})
    for across, techniques in itertools.product(_cross(entry.get("across", {})), settings):
        yield [*start, *across, *techniques]


def _cross(values: Mapping[str, Any]) -> list[list[str]]:
    choices = [[word(key, value) for value in _list(listed)] for key, listed in values.items()]
    return [list(combination) for combination in itertools.product(*choices)]


def _technique(name: str, value: Any) -> str:
    return word(f"technique.{name}", value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _checked(tree: Any, kind: str, kinds: Mapping[str, type], sweep: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise BadInput(f"sweep {sweep}: {tree!r} is not a mapping with the keys {', '.join(kinds)}")
    for key, value in tree.items():
        if key not in kinds:
            raise unknown(kind, key, kinds)
        if not isinstance(value, kinds[key]):
            raise BadInput(f"sweep {sweep}: {key} is not a {kinds[key].__name__}")
    return tree
