"""Runs cells for what occupied their memory, and finds the cells that a store holds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import runner
from bench.config import Job
from bench.errors import BadInput, OombenchError, Refused, unknown
from bench.moment import Moment
from bench.overrides import word
from bench.record import Record, Source, Status
from bench.resolve import plan, refusal
from bench.show import size
from bench.store import records_at

EXPLAIN_CELL = "bench.cell:explain_cell"
"""What runs a cell for this, by import path."""

_KEY = re.compile(r"[0-9a-f]{1,16}")


class NotExplained(OombenchError):
    """A cell that ended without a moment to explain."""

    exit_status = 1


def explained(job: Job) -> tuple[Record, Moment]:
    """Run a cell's memory pass in a process of its own, and say what occupied its last peak, or all when it ran out.

    Raises:
        Refused: The workload cannot take a technique.
        NotExplained: The cell crashed, or took too long.
    """
    from bench.vgpu.attribution import Allocation

    if (reason := refusal(job.cell)) is not None:
        raise Refused(reason)
    asked = dataclasses.replace(job, trace=True, explain=False)
    [outcome] = runner.run_jobs([asked], runner.Options(run_cell=EXPLAIN_CELL))
    record = outcome.record
    if record.status not in (Status.OK, Status.OOM) or not outcome.trace:
        raise NotExplained(f"{job.label}: {record.status}: {record.reason}")
    (name, _, reserved_bytes), *rows = outcome.trace
    return record, Moment(name, reserved_bytes, [Allocation(*row) for row in rows])


def planned(words: Sequence[str]) -> Job:
    """The job that the words describe, on the virtual GPU, which alone can explain.

    Raises:
        BadInput: A word is wrong.
    """
    if any(each.startswith("source=") for each in words):
        raise BadInput("only the virtual GPU can tell what occupies its memory: leave out source=")
    return plan([*words, "source=predicted"])


def is_key(text: str) -> bool:
    """Whether the text could be the key of a cell, or the beginning of one."""
    return _KEY.fullmatch(text) is not None


def find_record(key: str, stores: Sequence[Path]) -> Record:
    """The one stored cell whose key begins with `key`.

    Raises:
        BadInput: There is none, or more than one.
    """
    records = {record.key: record for store in stores for record in records_at(store)}
    found = [record for name, record in records.items() if name.startswith(key)]
    if not found:
        places = ", ".join(str(store) for store in stores)
        if not records:
            raise BadInput(f"unknown key {key!r}: no cells in {places}")
        nearest = unknown("key", key, records)
        raise BadInput(f"{str(nearest).partition(' known: ')[0].rstrip()} {len(records)} cells in {places}")
    if len(found) > 1:
        keys = ", ".join(record.key for record in found[:5])
        more = f" ... and {len(found) - 5} more" if len(found) > 5 else ""
        raise BadInput(f"key {key!r} begins the keys of {len(found)} cells: {keys}{more}")
    return found[0]


def job_of(record: Record) -> Job:
    """The job of a stored cell, predicted.

    Raises:
        BadInput: It is not a cell any more: a workload, setting or technique is gone.
    """
    cell = record.cell
    try:
        words = [word("workload.path", cell["workload"]), word("workload.preset", cell["preset"])]
        words += _words("workload.settings", cell["settings"])
        words += _words("technique", cell["techniques"])
        words += _words("steps", {"memory": cell["steps"]["memory"]})
        words += [word("target", cell["target"])]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"cell {record.key} is damaged: {type(error).__name__}: {error}") from error
    return planned(words)


def drifted(record: Record, moment: Moment) -> str | None:
    """What to say if a cell's memory is not what its record has; None where it is, or was measured."""
    peak = record.steady or record.first
    if record.source is not Source.PREDICTED:
        return f"{record.key} was {record.source}; what occupies its memory is predicted"
    if peak is not None and record.status is Status.OK and peak.allocated_bytes != moment.allocated_bytes:
        stored, now = size(peak.allocated_bytes), size(moment.allocated_bytes)
        return f"{record.key} was stored with {stored} at its peak, with this code it has {now}"
    return None


def _words(group: str, values: Mapping[str, Any]) -> list[str]:
    return [word(f"{group}.{name}", value) for name, value in values.items()]
