"""What occupies memory, what changed, and what a replay came to, on the terminal: GiB and MiB."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from bench.difference import Difference
from bench.frames import line_of
from bench.moment import COLUMNS, Moment, folded, leading
from bench.replay import Failure, Outcome
from bench.show import size
from bench.vgpu.allocator_config import AllocatorConfig
from bench.what_if import Recorded, Replays


def print_moment(console: Console, moment: Moment, top: int) -> None:
    """What occupied the memory: a table each by category, module, operator and line, then the largest allocations."""
    _line(console, moment.headline())
    total = moment.allocated_bytes
    for column in COLUMNS:
        table = _table(f"by {column}", "allocated", "share")
        rows, rest = leading(moment.rows(column, top), top)
        rows += [(f"... and {rest.count} more", rest.size_bytes)] if rest.count else []
        for name, size_bytes in [*rows, ("total", total)]:
            table.add_row(size(size_bytes), f"{size_bytes / max(1, total):.1%}", Text(name))
        console.print(table)
    table = _table("largest allocations", "each", "count")
    largest, more = moment.largest(top)
    for made, count in largest:
        who = f"{made.category}: {made.operator} in {made.module} at {made.line}"
        table.add_row(size(made.size_bytes), str(count), Text(f"{who}\n  {made.text}" if made.text else who))
    if more:
        table.add_row("", f"{more:,}", f"... and {more:,} more")
    console.print(table)


def print_difference(console: Console, difference: Difference, top: int) -> None:
    """What changed, biggest change first."""
    sides = (difference.before, difference.after)
    for mark, name, moment in zip("AB", difference.names, sides, strict=True):
        _line(console, f"{mark}: {name}: {moment.headline()}")
    _line(console, f"B - A: {_signed(difference.allocated_bytes)} allocated")
    for column in COLUMNS:
        console.print(_changes(difference, column, top))
    for remark in difference.remarks:
        _line(console, f"note: {remark}")


def _changes(difference: Difference, column: str, top: int) -> Table:
    changes = difference.by(column)
    before, after = difference.before.by(column), difference.after.by(column)
    if len(changes) > top:
        changes, before, after = folded(changes), folded(before), folded(after)
    table = _table(f"by {column}", "change", "A", "B")
    rows, rest = leading(changes, top)
    for name, change in rows:
        table.add_row(_signed(change), size(before.get(name, 0)), size(after.get(name, 0)), Text(name))
    if rest.count:
        table.add_row(_signed(rest.size_bytes), "", "", f"... and {rest.count} more")
    totals = (size(sum(before.values())), size(sum(after.values())))
    table.add_row(_signed(difference.allocated_bytes), *totals, "total")
    return table


def print_replays(console: Console, replays: Replays) -> None:
    """What the snapshot says beside what its replays came to."""
    snapshot = replays.snapshot
    begins = "from the first allocation on" if replays.start.empty else "from within a run"
    _line(console, f"{snapshot.name}: {len(snapshot.events):,} events of device {snapshot.device}, {begins}")
    columns: list[tuple[str, Mapping[str, str]]] = [
        ("recorded", _recorded(replays.recorded, replays.own_config, snapshot.target)),
        ("replayed", _replayed(replays.own, replays.own_config, snapshot.target, replays.recorded.capacity_bytes)),
    ]
    if replays.asked is not None:
        target = replays.target or snapshot.target
        columns.append(("instead", _replayed(replays.asked, replays.config, target, replays.capacity_bytes)))
    table = Table("", *(_right(name) for name, _ in columns), box=None)
    for row in columns[-1][1]:
        table.add_row(row, *(Text(cells.get(row, "")) for _, cells in columns))
    console.print(table)
    for label, outcome in (("replayed", replays.own), ("instead", replays.asked)):
        if outcome is not None and outcome.failure is not None:
            _line(console, f"{label}: {failure_line(outcome.failure)}")
        if outcome is not None and outcome.served:
            _line(console, f"{label}: {outcome.served} requests that failed when recorded are served")
    for remark in replays.remarks:
        _line(console, f"note: {remark}")


def failure_line(failure: Failure) -> str:
    """Where a replay ran out of memory."""
    return (
        f"out of memory at event {failure.index:,}: tried to allocate {size(failure.tried_bytes)} with "
        f"{size(failure.free_bytes)} free, {size(failure.allocated_bytes)} allocated, "
        f"{size(failure.reserved_bytes)} reserved; asked for at {line_of(failure.event.entry)}"
    )


def _recorded(recorded: Recorded, config: AllocatorConfig, target: str | None) -> dict[str, str]:
    return {
        "configuration": config.text() or "default",
        "card": _card(target, recorded.capacity_bytes),
        "reserved, peak": size(recorded.peak_reserved_bytes),
        "reserved, end": size(recorded.end_reserved_bytes),
        "allocated, end": size(recorded.end_allocated_bytes),
        "fragmentation, end": size(recorded.end_reserved_bytes - recorded.end_allocated_bytes),
        "retries": str(recorded.retries),
        "out of memory": _times(recorded.failures),
    }


def _replayed(
    outcome: Outcome, config: AllocatorConfig, target: str | None, capacity_bytes: int | None
) -> dict[str, str]:
    return {
        "configuration": config.text() or "default",
        "card": _card(target, capacity_bytes),
        "allocated, peak": size(outcome.peak_allocated_bytes),
        "reserved, peak": size(outcome.peak_reserved_bytes),
        "fragmentation then": size(outcome.fragmentation_bytes),
        "reserved, end": size(outcome.end_reserved_bytes),
        "allocated, end": size(outcome.end_allocated_bytes),
        "fragmentation, end": size(outcome.end_reserved_bytes - outcome.end_allocated_bytes),
        "retries": str(outcome.retries),
        "out of memory": "no" if outcome.failure is None else f"at event {outcome.failure.index:,}",
    }


def _card(target: str | None, capacity_bytes: int | None) -> str:
    if capacity_bytes is None:
        return "unknown"
    return f"{target or 'usable'}, {size(capacity_bytes)}"


def _times(count: int) -> str:
    return {0: "no", 1: "once"}.get(count, f"{count} times")


def _signed(size_bytes: int) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{size(abs(size_bytes))}" if size_bytes else "0"


def _table(title: str, *figures: str) -> Table:
    return Table(*(_right(figure) for figure in figures), Column(title, overflow="fold"), box=None)


def _right(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)


def _line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
