"""Memory by phase and by step as TensorBoard's scalars, the same for every framework.

Written by TensorBoard's own writer, one run a cell: `tensorboard --logdir DIR` shows the cells over each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.errors import BadInput
from bench.store import WriteFailed

GIB = 2**30

PEAK = "peak of the step"
"""The phase of a trace row that tells the peaks of a step."""


def check_installed() -> None:
    """Raise `BadInput`, with the line that installs it, where TensorBoard is missing."""
    if find_spec("tensorboard") is None:
        raise BadInput("tensorboard= needs TensorBoard: pip install -e '.[tensorboard]'")


def write_scalars(folder: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    """Write the trace rows of one cell into `folder`, made where it is missing.

    Tags are "<memory>_gib/<phase>", at the number of the phase's call since the first step, and "peak_<memory>_gib" at
    the number of the step.

    Args:
        folder: Of this cell alone.
        rows: Step, phase, call, allocated bytes, reserved bytes or None.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    try:
        writer = EventFileWriter(str(folder))
        for tag, number, value in _scalars(rows):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=number, summary=summary))
        writer.close()
    except OSError as error:
        raise WriteFailed(f"cannot write {folder}: {error.strerror}") from error


def _scalars(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[str, int, float]]:
    """Tag, number and GiB of everything that the rows tell."""
    calls: Counter[str] = Counter()
    for step, phase, _, allocated_bytes, reserved_bytes in rows:
        number = step if phase == PEAK else calls[phase]
        calls[phase] += 1
        for memory, size_bytes in (("allocated", allocated_bytes), ("reserved", reserved_bytes)):
            tag = f"peak_{memory}_gib" if phase == PEAK else f"{memory}_gib/{phase}"
            if size_bytes is not None:
                yield tag, number, size_bytes / GIB
