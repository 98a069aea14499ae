"""The two things that `oombench diff` compares: snapshots by file name, cells by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.config import Job
from bench.difference import Difference, moment_of
from bench.errors import BadInput
from bench.explaining import drifted, explained, find_record, is_key, job_of
from bench.moment import Moment
from bench.publication import stores_at
from bench.record import Record
from bench.snapshot import Snapshot, read_snapshot


@dataclass(frozen=True)
class Side:
    """One of the two: the moment, whose it is, and what a reader must know of it."""

    name: str
    moment: Moment
    remark: str | None = None


def compare(words: Sequence[str], stores: Sequence[Path], at: str | None) -> Difference:
    """Compare the first of two things with the second.

    Args:
        words: Each a snapshot file, the key of a stored cell or its beginning, or `store.jsonl:KEY`.
        stores: Where keys are looked for; none: all published stores.
        at: Moment of snapshots, "peak" or "end"; None: "peak" if all have a trace.

    Raises:
        BadInput: A word names nothing, or what it names cannot be read.
    """
    found = [_find(word, stores) for word in words]
    snapshots = [each for each in found if isinstance(each, Snapshot)]
    if at is None:
        at = "peak" if all(snapshot.events for snapshot in snapshots) else "end"
    elif at == "peak" and not all(snapshot.events for snapshot in snapshots):
        raise BadInput("--at peak needs the trace that torch.cuda.memory._record_memory_history() records")
    before, after = (_side(each, at) for each in found)
    remarks = [side.remark for side in (before, after) if side.remark is not None]
    return Difference(before.moment, after.moment, (before.name, after.name), remarks)


def _find(word: str, stores: Sequence[Path]) -> Snapshot | tuple[Record, Job]:
    """A snapshot, or a stored cell and its job. All that can be wrong is found here, before anything runs."""
    path, colon, key = word.rpartition(":")
    if colon and path.endswith(".jsonl"):
        stores = [Path(path)]
    elif is_key(word) and not Path(word).exists():
        key = word
    else:
        return read_snapshot(Path(word))
    record = find_record(key, stores_at(stores))
    return record, job_of(record)


def _side(found: Snapshot | tuple[Record, Job], at: str) -> Side:
    if isinstance(found, Snapshot):
        return Side(found.name, moment_of(found, at))
    record, job = found
    _, moment = explained(job)
    return Side(f"{record.key} {job.label}", moment, drifted(record, moment))
