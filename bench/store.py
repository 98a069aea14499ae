"""Records on disk: JSON lines, append only. A damaged line is reported and kept; it damages no other."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.errors import OombenchError
from bench.record import Record


class WriteFailed(OombenchError):
    """A store that cannot be written: a full disk, a folder without permission."""

    exit_status = 1


@dataclass(frozen=True)
class Problem:
    """A line that is no record."""

    path: Path
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: skipped: {self.why}"


class Store:
    """The records of one file.

    Attributes:
        path: The file; it need not exist.
        problems: The lines that the latest reading had to skip.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []

    def records(self) -> list[Record]:
        """Every record, of several with one key the last, in the order in which the keys first appear.

        Raises:
            OombenchError: The path is there but cannot be read.
        """
        return latest(self.history())

    def history(self) -> list[Record]:
        """Every record, in the order in which they were appended; raises as `records` does."""
        found: list[Record] = []
        self.problems = []
        for number, line in enumerate(self._lines(), start=1):
            if not line.strip():
                continue
            try:
                found.append(_read(line))
            except ValueError as error:
                self.problems.append(Problem(self.path, number, str(error).partition("\n")[0]))
        return found

    def prepare(self) -> None:
        """Make the folder and the file, so that a wrong place shows before time is spent on cells."""
        with self._opened():
            pass

    def append(self, record: Record) -> None:
        """Add one line, on the disk before this returns.

        Raises:
            WriteFailed: Not all of it could be written; the file is as it was.
        """
        line = json.dumps(record.to_dict(), separators=(",", ":")).encode() + b"\n"
        with self._opened() as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed: nobody else's line is cut off below
            length = os.fstat(descriptor).st_size
            if length and os.pread(descriptor, 1, length - 1) != b"\n":
                line = b"\n" + line  # a killed writer left half a line: that one stays alone
            try:
                written = os.write(descriptor, line)
                if written < len(line):
                    os.write(descriptor, line[written:])  # says why the first one stopped short
                os.fsync(descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, length)
                raise

    def _lines(self) -> list[bytes]:
        try:
            # A device would never end.
            return self.path.read_bytes().split(b"\n") if self.path.is_file() else []
        except OSError as error:
            raise OombenchError(f"cannot read {self.path}: {error.strerror}") from error

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor that appends; any failure inside names the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise WriteFailed(f"cannot write {self.path}: {error.strerror}") from error


def latest(records: Iterable[Record]) -> list[Record]:
    """Of several records with one key the last, in the order in which the keys first appear."""
    return list({record.key: record for record in records}.values())


def history_at(path: Path) -> list[Record]:
    """Every record of the store at `path`, its damaged lines reported on stderr."""
    store = Store(path)
    records = store.history()
    for problem in store.problems:
        print(problem, file=sys.stderr)
    return records


def records_at(path: Path) -> list[Record]:
    """The latest record of each cell in the store at `path`, its damaged lines reported on stderr."""
    return latest(history_at(path))


def _read(line: bytes) -> Record:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError("not a record: no JSON object")
    try:
        record = Record.from_dict(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a record: {error}") from error
    if not isinstance(record.key, str) or not isinstance(record.cell, dict):
        raise ValueError("not a record: key or cell of another type")
    return record
