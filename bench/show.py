"""A record on the terminal: GiB and milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from bench.record import Peak, Record, Status

GIB = 2**30
MIB = 2**20


def one_line(label: str, record: Record) -> str:
    """Label, status, and the figure or the reason that matters most."""
    if record.status is not Status.OK:
        return f"{record.status}  {label}: {record.reason}"
    peak, timing = record.steady or record.first, record.timing
    figures = [f"{size(peak.allocated_bytes)} allocated, {size(peak.reserved_bytes)} reserved"] if peak else []
    figures += [f"{milliseconds(timing.step_s)} a step"] if timing else []
    return f"{record.status}  {label}: {', '.join([*figures, record.source])}"


def print_record(console: Console, label: str, record: Record) -> None:
    """Everything that a reader of one cell wants, in a screen."""
    _line(console, label, style="bold")
    _line(console, " ".join(part for part in (str(record.status), f"({record.source})") if part))
    if record.reason is not None:
        _line(console, record.reason)
    peaks = [(name, peak) for name, peak in (("first step", record.first), ("steady step", record.steady)) if peak]
    if peaks:
        console.print(_peak_table(peaks))
    if peaks and peaks[-1][1].categories:
        console.print(_category_table(*peaks[-1]))
    for line in (*_figures(record), *(record.explanation or "").splitlines()):
        _line(console, line)


def print_trace(console: Console, rows: Iterable[tuple[Any, ...]]) -> None:
    """Memory at every call of a phase."""
    table = Table("step", "phase", *(_right(name) for name in ("call", "allocated MiB", "reserved MiB")), box=None)
    for step, phase, call, allocated_bytes, reserved_bytes in rows:
        reserved = "" if reserved_bytes is None else f"{reserved_bytes / MIB:.2f}"
        cells = (step, phase, call, f"{allocated_bytes / MIB:.2f}", reserved)
        table.add_row(*(str(cell) for cell in cells))
    console.print(table)


def size(size_bytes: int | None) -> str:
    """A size as printed."""
    if size_bytes is None:
        return "unknown"
    return f"{size_bytes / GIB:.3f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.2f} MiB"


def printable(text: str) -> str:
    """The beginning of a text from elsewhere, without what a terminal could take for a command."""
    return "".join(char if char.isprintable() else "?" for char in text[:1000])


def milliseconds(duration_s: float) -> str:
    """A duration as printed."""
    return f"{duration_s * 1e3:.3f} ms"


def _peak_table(peaks: Iterable[tuple[str, Peak]]) -> Table:
    table = Table("peak of", *(_right(name) for name in ("allocated", "reserved", "process")), box=None)
    for name, peak in peaks:
        table.add_row(name, size(peak.allocated_bytes), size(peak.reserved_bytes), size(peak.process_bytes))
    return table


def _category_table(name: str, peak: Peak) -> Table:
    table = Table(f"at the {name}'s peak", _right("allocated"), _right("share"), box=None)
    for category, size_bytes in sorted(peak.categories.items(), key=lambda item: -item[1]):
        table.add_row(category, size(size_bytes), f"{size_bytes / max(1, peak.allocated_bytes):.1%}")
    return table


def _figures(record: Record) -> Iterable[str]:
    if record.parameter_counts:
        parts = ", ".join(f"{name} {count:,}" for name, count in record.parameter_counts.items())
        yield f"parameters: {sum(record.parameter_counts.values()):,} ({parts})"
    if record.static_bytes is not None:
        yield f"static (after a step): {size(record.static_bytes)}"
    if record.timing is not None:
        step_s = record.timing.step_s
        shares = sorted(record.timing.bound_s.items(), key=lambda item: -item[1])
        bound = ", ".join(f"{name} {milliseconds(bound_s)}" for name, bound_s in shares if bound_s)
        yield f"step time: {milliseconds(step_s)}" + (f" (bounded by {bound})" if bound else "")
        if record.items_per_step and step_s > 0:
            yield f"throughput: {record.items_per_step / step_s:,.1f} {record.unit or 'items'}/s"
    if record.traces is not None:
        yield f"tf.function traces: {record.traces}"
    if record.gradient is not None:
        yield f"gradient: {record.gradient}"
    for note in record.notes:
        yield f"note: {note}"


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
