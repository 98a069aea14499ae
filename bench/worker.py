"""What happens inside the process of one cell."""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from bench.config import Cell
from bench.frameworks import load
from bench.record import Record, Source, Status

TraceRow = tuple[Any, ...]
"""Step, phase, call, allocated bytes, reserved bytes."""


def work(connection: Connection, function: str, cell: Cell, asked: Mapping[str, Any], trace: bool, quiet: bool) -> None:
    """Run one cell and send back its record and its trace rows. Whatever happens, the record says so.

    `asked` goes to `function` by name: what else than numbers is wanted.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent alone, which ends us
    os.setsid()  # so that what a cell starts can be killed with it
    _silence(quiet)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    rows: list[TraceRow] = []
    try:
        run_cell: Callable[..., Record] = load(function)
        if cell.source is not Source.MEASURED:
            _use_one_thread()
        record = run_cell(cell, (lambda *row: rows.append(row)) if trace else None, **asked)
        json.dumps(record.to_dict())  # what cannot be stored is this cell's failure, not the sweep's
    except BaseException as error:
        record, rows = failure(cell, Status.CRASH, reason_of(error)), []
    connection.send((record, rows))
    signal.pause()  # the parent ends us, and with us whatever the cell has started


def failure(cell: Cell, status: Status, reason: str) -> Record:
    """The record of a cell that did not report by itself."""
    return Record(key=cell.key, cell=cell.to_dict(), status=status, source=cell.source, reason=reason)


def reason_of(error: BaseException) -> str:
    """Type, message and the innermost frame of the project or the user, in one line without absolute paths."""
    message = " ".join(str(error).split()).replace(f"{Path.cwd()}/", "").replace(str(Path.home()), "~")
    where = _innermost(error)
    return ": ".join(part for part in (type(error).__name__, message) if part) + (f" ({where})" if where else "")


def _innermost(error: BaseException) -> str | None:
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_ours(frame)]
    if not frames:
        return None
    frame, line = frames[-1]
    return f"{frame.f_globals.get('__name__', '?')}:{line} in {frame.f_code.co_name}"


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame belongs to this project or to the user, not to Python, a library or this module."""
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] in ("bench", "workloads"):
        return module != __name__
    file = frame.f_code.co_filename
    foreign = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return os.path.isabs(file) and not file.startswith(tuple(foreign))  # generated and compiled code has no such path


def _silence(quiet: bool) -> None:
    """Keep the cell's own output off our results; off the terminal too where a progress bar is shown."""
    sys.stdout.flush()
    if quiet:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
    os.dup2(2, 1)


def _die_with_parent() -> None:
    """End this process when the one that wants its result is gone, killed perhaps."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _use_one_thread() -> None:
    """Predicted cells run beside each other; one that took every core would disturb its neighbours."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for libraries that are still to be loaded
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
