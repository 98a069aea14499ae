"""Memory snapshots of PyTorch, as `torch.cuda.memory._dump_snapshot` and its twin on the virtual GPU write them.

Everything in the file is checked before it is used: it may come from anybody.
"""

from __future__ import annotations

import difflib
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.errors import BadInput
from bench.plain_pickle import NotPlain, loads
from bench.show import printable

MAX_FILE_BYTES = 2**30
MAX_ENTRIES = 3_000_000  # events, and blocks: some 2 GB of host memory
MAX_BYTES = 2**42  # of one segment or block, far beyond any card

ALLOCATED = "active_allocated"
WAITING = frozenset({"active_pending_free", "active_awaiting_free"})
INACTIVE = "inactive"


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a trace.

    Attributes:
        action: "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
            "segment_unmap", "oom", "snapshot".
        address: What it is about; of an "oom", the bytes that were free.
        size_bytes: What was asked for; of segments, their size.
        stream: Number of the stream.
        pool: Memory pool; (0, 0) is the usual one.
        entry: All of it, as the file has it.
    """

    action: str
    address: int
    size_bytes: int
    stream: int
    pool: tuple[int, int]
    entry: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment; `state` is `ALLOCATED`, `INACTIVE` or one of `WAITING`."""

    address: int
    size_bytes: int
    requested_bytes: int
    state: str
    entry: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """What one cudaMalloc returned, or a mapped range of an expandable segment."""

    address: int
    size_bytes: int
    stream: int
    pool: tuple[int, int]
    small: bool
    expandable: bool
    blocks: list[Block]


@dataclass(frozen=True)
class Snapshot:
    """What a snapshot tells of one device.

    Attributes:
        name: Of the file.
        device: Index of the device.
        segments: By address.
        events: The trace, oldest first; empty where no history was recorded.
        settings: `allocator_settings`, unchecked.
        capacity_bytes: What the card can hand out in all, which only the virtual GPU says.
        target: Name of the virtual card.
    """

    name: str
    device: int
    segments: list[Segment]
    events: list[Event]
    settings: dict[str, Any] = field(default_factory=dict)
    capacity_bytes: int | None = None
    target: str | None = None

    @property
    def reserved_bytes(self) -> int:
        """In segments, at the end."""
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """In blocks that are handed out, at the end."""
        return sum(b.size_bytes for segment in self.segments for b in segment.blocks if b.state == ALLOCATED)


def read_snapshot(path: Path, device: int | None = None) -> Snapshot:
    """Read one device's part of a snapshot; without `device`, that of the first one that has any.

    Raises:
        BadInput: There is no such file or device, or the file is not a snapshot, or larger than the limits.
    """
    try:
        value = loads(_bytes(path))
    except NotPlain as error:
        raise BadInput(f"{path} is refused: {error}") from error
    try:
        return snapshot_of(path.name, value, device)
    except Malformed as error:
        raise BadInput(f"{path} is not a memory snapshot: {error}") from error


class Malformed(ValueError):
    """What is wrong with the content; the message is one line."""


def _bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{path} is not a file")
        if status.st_size > MAX_FILE_BYTES:
            raise BadInput(f"{path} has {status.st_size:,} bytes, more than the {MAX_FILE_BYTES:,} that are read")
        return path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"no file {str(path)!r}{_nearest(path)}") from None
    except (OSError, ValueError) as error:  # a name with a null byte
        raise BadInput(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f": did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def snapshot_of(name: str, value: Any, device: int | None = None) -> Snapshot:
    """One device's part of what a snapshot file holds.

    Raises:
        BadInput: There is no such device.
        Malformed: It is not what a snapshot holds.
    """
    if isinstance(value, list):  # torch.cuda.memory_snapshot(): segments without history
        value = {"segments": value}
    if not isinstance(value, dict) or "segments" not in value:
        raise Malformed("it has no segments")
    segments = _entries(value["segments"], "segments")
    blocks = [segment.get("blocks") for segment in segments]
    if sum(len(each) for each in blocks if isinstance(each, list)) > MAX_ENTRIES:
        raise Malformed(f"more than {MAX_ENTRIES:,} blocks")
    traces = value.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise Malformed("device_traces is not a list of lists")
    device = _device(segments, traces, device)
    trace = traces[device] if device < len(traces) else []
    if len(trace) > MAX_ENTRIES:
        raise Malformed(f"more than {MAX_ENTRIES:,} events")
    own = [_segment(segment) for segment in segments if segment.get("device", 0) == device]
    settings, card = value.get("allocator_settings", {}), value.get("virtual_gpu", {})
    if not isinstance(settings, dict) or not isinstance(card, dict):
        raise Malformed("its settings are not a dict")
    return Snapshot(
        name=name,
        device=device,
        segments=sorted(own, key=lambda segment: segment.address),
        events=[_event(entry) for entry in _entries(trace, "device_traces")],
        settings=settings,
        capacity_bytes=_number(card, "capacity_bytes") if card else None,
        target=printable(_word(card, "target")) if card else None,
    )


def _device(segments: Sequence[dict[str, Any]], traces: Sequence[list[Any]], wanted: int | None) -> int:
    present = {index for index, trace in enumerate(traces) if trace}
    present |= {_number(segment, "device", 0) for segment in segments}
    if wanted is not None and wanted not in present:
        raise BadInput(f"no device {wanted} in the snapshot: it has {', '.join(map(str, sorted(present))) or 'none'}")
    return min(present, default=0) if wanted is None else wanted


def _segment(entry: dict[str, Any]) -> Segment:
    address, size_bytes = _number(entry, "address"), _number(entry, "total_size")
    blocks = []
    at = address
    for block in _entries(entry.get("blocks"), "blocks"):
        state = _word(block, "state")
        size = _number(block, "size")
        if state not in (ALLOCATED, INACTIVE, *WAITING):
            raise Malformed(f"a block is {state!r}")
        # Snapshots before torch 2.1 do not tell where a block begins: where the one before it ends.
        if _number(block, "address", at) != at:
            raise Malformed("blocks do not follow each other")
        blocks.append(Block(at, size, _number(block, "requested_size", size), state, block))
        at += size
    if at != address + size_bytes:
        raise Malformed("blocks do not add up to their segment")
    return Segment(
        address,
        size_bytes,
        _number(entry, "stream", 0),
        _pool(entry.get("segment_pool_id", (0, 0))),
        entry.get("segment_type") == "small",
        entry.get("is_expandable") is True,
        blocks,
    )


def _event(entry: dict[str, Any]) -> Event:
    action = _word(entry, "action")
    address = _number(entry, "device_free" if action == "oom" else "addr", 0)
    pool = _pool(entry.get("pool_id", (0, 0)))
    size = entry.get("size", 0)
    if action == "oom" and type(size) is int:  # one may ask for more than any card has
        size = min(size, MAX_BYTES)
    return Event(action, address, _number({"size": size}, "size"), _number(entry, "stream", 0), pool, entry)


def _entries(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Malformed(f"{what} is not a list of dicts")
    return value


def _number(entry: dict[str, Any], key: str, default: int | None = None) -> int:
    value = entry.get(key, default)
    limit = MAX_BYTES if "size" in key else 2**62
    if type(value) is not int or not 0 <= value <= limit:
        raise Malformed(f"{key} is {_short(value)}, not a number of bytes, address or index")
    return value


def _word(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise Malformed(f"{key} is {_short(value)}, not a word")
    return value


def _pool(value: Any) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(part) is int for part in value):
        return value[0], value[1]
    raise Malformed(f"a pool is {_short(value)}")


def _short(value: Any) -> str:
    """A value in a message: its type if it is a container, as printing one could take for ever."""
    if isinstance(value, str):
        return repr(value[:40])
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"
