"""The two plots of a table: memory against throughput, and what the peak is made of.

Artists carry a gid, by which tests find them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bench.record import Source, Status
from bench.report.frame import PARTS, SOURCES, Row, rows
from bench.report.sheet import DPI, FAILED, FAINT, INK, LINE_IN, PALETTE, STYLE, Box, Sheet, Spot, Unit, place
from bench.report.table import bytes_text

COLOURS = {**dict(zip(PARTS, (PALETTE[i] for i in (0, 1, 2, 9, 8, 4)), strict=False)), "other": (0.75, 0.75, 0.75)}
UNSPLIT = (0.55, 0.55, 0.55)
LOOK: dict[Source, tuple[str, Any, Literal["solid", "dotted", "dashed"]]] = {
    Source.MEASURED: ("o", (0.1, 0.1, 0.1), "solid"),
    Source.EMULATED: ("^", PALETTE[2], "dotted"),
    Source.PREDICTED: ("s", PALETTE[0], "dashed"),
}
LABEL_PT, POINT_PX = 8.5, DPI / 72
CHANGES = "changes training"
AXES_IN = 5.85  # width of the bars' axes


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (memory, throughput) points that no other beats in one without losing in the other.

    By rising memory. Of equal points all are in.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front


# Memory against throughput ------------------------------------------------------------------------------------------


def pareto_figure(table: pd.DataFrame) -> Figure | None:
    """Every configuration as a point, those that ran out of memory as crosses; None where there is no point."""
    found = rows(table)
    points, failures = _points(found), [row for row in found if row["status"] == Status.OOM]
    if not points:
        return None
    key = _key(points, failures)
    height_in = max(5.2, 1.4 + LINE_IN * sum(map(len, key.values())))
    with mpl.rc_context(STYLE):
        sheet = Sheet.new(found, [*points, *failures], "memory against throughput", height_in, (0.85, 5.15))
        edge_bytes = _edge_bytes(found, points, failures)
        unit = Unit.of(edge_bytes)
        spots = [(unit(row["allocated_bytes"]), row["items_per_s"]) for row in points]
        # Beyond the edge there has to be room for the longest text at a cross.
        room = 0.2 if any(row["is_baseline"] for row in failures) else 0.13
        _range(sheet.axes.xaxis, [x for x, _ in spots], unit(edge_bytes), room)
        _range(sheet.axes.yaxis, [y for _, y in spots], max(y for _, y in spots), 0.13)
        sheet.axes.set_xlabel(f"peak allocated memory ({unit.name})")
        sheet.axes.set_ylabel(f"throughput ({found[0]['unit'] or 'items'}/s)")
        lines = sheet.card(found[0]["capacity_bytes"], unit, shade=True)
        for source in SOURCES:
            own = [spot for spot, row in zip(spots, points, strict=True) if row["source"] == source]
            lines += _draw_source(sheet.axes, own, source)
        labels = _labels(key)
        failed = _draw_failures(sheet.axes, [labels[name] for name in _names(failures)], unit(edge_bytes))
        _draw_labels(sheet.axes, [labels[row["configuration"]] for row in points], spots, [*lines, *failed])
        _draw_key(sheet, key, labels, points)
        sheet.legend()
    return sheet.figure


def _points(found: Sequence[Row]) -> list[Row]:
    return [row for row in found if row["status"] == Status.OK and row["allocated_bytes"] and row["items_per_s"]]


def _names(drawn: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["configuration"] for row in drawn))


def fronts(found: Sequence[Row]) -> dict[str, list[str]]:
    """The configurations on the Pareto front, by rising memory, for each source: no front mixes sources."""
    members = {}
    for source in dict.fromkeys(row["source"] for row in found):
        own = [row for row in _points(found) if row["source"] == source]
        chosen = pareto_front([(row["allocated_bytes"], row["items_per_s"]) for row in own])
        members[source] = [own[index]["configuration"] for index in chosen]
    return members


def _edge_bytes(found: Sequence[Row], points: Sequence[Row], failures: Sequence[Row]) -> float:
    """Where the crosses stand: at the card's capacity, if that is known and either near or needed."""
    largest: int = max(row["allocated_bytes"] for row in points)
    capacity_bytes: int | None = found[0]["capacity_bytes"]
    if capacity_bytes and (failures or largest > 0.25 * capacity_bytes):
        return max(capacity_bytes, largest)
    return max([largest, *(1.1 * (row["allocated_bytes"] or 0) for row in failures)])


def _range(axis: Axis, values: Sequence[float], upper: float, room: float) -> None:
    """Logarithmic over more than an order of magnitude, else from 0, or from near the values where they lie close."""
    axes, lower = axis.axes, min(values)
    set_scale, set_limits = (axes.set_xscale, axes.set_xlim) if axis is axes.xaxis else (axes.set_yscale, axes.set_ylim)
    if upper > 12 * lower:
        set_scale("log")
        set_limits(lower / (upper / lower) ** 0.1, upper * (upper / lower) ** room)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if upper < 300 * lower else (1,)))
        axis.set_minor_formatter(NullFormatter())
    else:
        close = lower > 0.6 * upper
        span = max(upper - lower, 0.05 * upper) if close else upper
        set_limits(lower - 0.13 * span if close else 0, upper + room * span)
        axis.set_major_locator(MaxNLocator(7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _draw_source(axes: Axes, spots: Sequence[Spot], source: Source) -> list[Box]:
    """The points and the front of one source; returns where the front runs."""
    if not spots:
        return []
    marker, colour, line = LOOK[source]
    xs, ys = zip(*spots, strict=True)
    axes.scatter(xs, ys, s=34, marker=marker, color=[colour], zorder=3, label=source, gid=f"points-{source}")
    front = [spots[index] for index in pareto_front(spots)]
    xs, ys = zip(*front, strict=True)
    style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.1, "alpha": 0.7, "zorder": 2}
    # Steps: with the memory between two points, nothing faster is to be had than the smaller one.
    axes.step(xs, ys, where="post", label=f"Pareto front, {source}", gid=f"front-{source}", **style)
    runs = []
    for start, end in pairwise(_pixels(axes.transData, spot) for spot in front):
        runs.append((start[0], start[1] - POINT_PX, end[0], start[1] + POINT_PX))
        runs.append((end[0] - POINT_PX, start[1], end[0] + POINT_PX, end[1]))
    return runs


def _draw_failures(axes: Axes, texts: Sequence[str], x: float) -> list[Box]:
    """Crosses one above the other, as a failure has a place in memory and none in throughput; where they stand."""
    gap = min(0.055, 0.92 / max(len(texts), 1))
    heights = [0.045 + gap * index for index in range(len(texts))]
    across = axes.get_xaxis_transform()
    style: dict[str, Any] = {"color": [FAILED], "linewidths": 1.8, "zorder": 4, "transform": across}
    if texts:
        said = "out of memory (height without meaning)"
        axes.scatter([x] * len(texts), heights, s=36, marker="x", label=said, gid="oom", **style)
    boxes = []
    for text, height in zip(texts, heights, strict=True):
        _label(axes, text, (x, height), (7, 0), FAILED, xycoords=across, ha="left")
        left, middle = _pixels(across, (x, height))
        boxes.append(
            (left - 5 * POINT_PX, middle - 5 * POINT_PX, left + 5 * POINT_PX + _width(text), middle + 5 * POINT_PX)
        )
    return boxes


def _pixels(transform: Any, spot: Spot) -> Spot:
    x, y = transform.transform(spot)
    return float(x), float(y)


def _width(text: str) -> float:
    return (0.62 * len(text) + 0.2) * LABEL_PT * POINT_PX


def _draw_labels(axes: Axes, texts: Sequence[str], spots: Sequence[Spot], avoid: Sequence[Box]) -> None:
    left, lower, right, upper = axes.bbox.extents
    anchors = [_pixels(axes.transData, spot) for spot in spots]
    sizes = [(_width(text), 1.15 * LABEL_PT * POINT_PX) for text in texts]
    centres = place(anchors, sizes, 4 * POINT_PX, avoid, (left, lower, right, upper))
    for text, spot, anchor, centre in zip(texts, spots, anchors, centres, strict=True):
        offset = ((centre[0] - anchor[0]) / POINT_PX, (centre[1] - anchor[1]) / POINT_PX)
        far = abs(offset[0]) > 14 + 3 * len(text) or abs(offset[1]) > 16
        arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": "0.5", "shrinkB": 3} if far else None
        _label(axes, text, spot, offset, INK, arrowprops=arrow, ha="center")


def _label(axes: Axes, text: str, spot: Spot, offset: Spot, colour: Any, **style: Any) -> None:
    drawn = axes.annotate(
        text,
        spot,
        offset,
        textcoords="offset points",
        va="center_baseline",
        fontsize=LABEL_PT,
        color=colour,
        weight="bold" if text == "baseline" else "normal",
        annotation_clip=False,
        zorder=5,
        gid="label",
        **style,
    )
    drawn.set_path_effects([withStroke(linewidth=2, foreground="white")])


def _key(points: Sequence[Row], failures: Sequence[Row]) -> dict[str, list[str]]:
    """The lines of each configuration in the key."""
    sources = {row["source"] for row in [*points, *failures]}
    key = {}
    for name in _names([*points, *failures]):
        failed = [row["source"] for row in failures if row["configuration"] == name]
        changes = any(row["gradient"] == CHANGES for row in points if row["configuration"] == name)
        oom = f" (OOM{', ' + ' and '.join(failed) if len(sources) > 1 else ''})" if failed else ""
        key[name] = textwrap.wrap(name + " *" * changes + oom, 34)
    return key


def _labels(names: Iterable[str]) -> dict[str, str]:
    """What stands beside a configuration's points: "baseline", or its number in the key."""
    numbered = [name for name in names if name != "baseline"]
    return {"baseline": "baseline"} | {name: str(number) for number, name in enumerate(numbered, start=1)}


def _draw_key(sheet: Sheet, key: Mapping[str, Sequence[str]], labels: Mapping[str, str], points: Sequence[Row]) -> None:
    """The configurations behind the numbers, beside the axes."""
    on_front = {name for front in fronts(points).values() for name in front}
    fitting = _names(points)
    y_in = 0.69
    sheet.text(6.2, y_in, "Configurations", fontsize=8, color=FAINT)
    for name, lines in key.items():
        style: dict[str, Any] = {"fontsize": 8, "color": INK if name in fitting else FAILED}
        style["weight"] = "bold" if name in on_front else "normal"
        if name != "baseline":
            sheet.text(6.38, y_in + LINE_IN, labels[name], ha="right", **style)
        for line in lines:
            y_in += LINE_IN
            sheet.text(6.46, y_in, line, gid="key", **style)
    remarks = [
        "bold: on a Pareto front",
        *(["* changes training"] if any(row["gradient"] == CHANGES for row in points) else []),
    ]
    for index, remark in enumerate(remarks, start=1):
        sheet.text(6.2, y_in + 0.06 + LINE_IN * index, remark, fontsize=8, color=FAINT)


# What the peak is made of -------------------------------------------------------------------------------------------


def memory_figure(table: pd.DataFrame) -> Figure | None:
    """A bar per row, its peak allocated memory by category; None where no row has memory."""
    found = rows(table)
    bars = [row for row in found if row["allocated_bytes"]]
    if not bars:
        return None
    longest = max(_end_bytes(row) for row in bars)
    capacity_bytes = found[0]["capacity_bytes"] or 0
    unit = Unit.of(longest)
    several = len({row["source"] for row in bars}) > 1
    with mpl.rc_context(STYLE):
        sheet = Sheet.new(found, bars, "what the peak is made of", 1.8 + 0.27 * len(bars), (2.95, AXES_IN))
        axes = sheet.axes
        near = capacity_bytes if longest > 0.25 * capacity_bytes else 0
        # Far enough for every total: a character of it is some 0.075 in wide.
        ends = [_end_bytes(row) / (1 - (0.2 + 0.075 * len(_total(row))) / AXES_IN) for row in bars]
        axes.set_xlim(0, unit(max([1.06 * near, *ends])))
        axes.set_ylim(len(bars) - 0.4, -0.6)
        sheet.card(capacity_bytes, unit)
        for index, row in enumerate(bars):
            _draw_bar(axes, index, row, unit)
        axes.set_yticks(range(len(bars)), [_bar_name(row, several) for row in bars], fontsize=8)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"peak allocated memory ({unit.name})")
        parts = {part: COLOURS[part] for part in PARTS if any(row[f"{part}_bytes"] for row in bars)}
        unsplit = any(row["activations_bytes"] is None for row in bars)
        sheet.legend(parts | ({"not split by the card": UNSPLIT} if unsplit else {}))
    return sheet.figure


def _end_bytes(row: Row) -> int:
    return int(max(row["allocated_bytes"], row["reserved_bytes"] or 0))


def _bar_name(row: Row, several: bool) -> str:
    name = row["configuration"] + (f" ({row['source']})" if several else "")
    return "\n".join(textwrap.wrap(name, 41))


def _total(row: Row) -> str:
    total = bytes_text(row["allocated_bytes"])
    if row["status"] == Status.OOM:
        return f"OOM at {total}"
    return total if row["status"] == Status.OK else f"{total} ({row['status']})"


def _draw_bar(axes: Axes, index: int, row: Row, unit: Unit) -> None:
    failed = row["status"] == Status.OOM
    parts = [(part, row[f"{part}_bytes"], COLOURS[part]) for part in PARTS if row[f"{part}_bytes"]]
    left_bytes = 0
    for part, part_bytes, colour in parts or [("not split by the card", row["allocated_bytes"], UNSPLIT)]:
        style: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 0.5, "zorder": 2}
        (bar,) = axes.barh(index, unit(part_bytes), 0.66, unit(left_bytes), **style)
        bar.set_hatch("////" if failed else None)
        bar.set_gid(f"part-{part}")
        left_bytes += part_bytes
    if row["reserved_bytes"]:
        style = {
            "color": INK,
            "marker": "|",
            "markersize": 12,
            "markeredgewidth": 1.4,
            "linestyle": "none",
            "zorder": 3,
        }
        axes.plot([unit(row["reserved_bytes"])], [index], label="reserved", gid="reserved", **style)
    axes.annotate(
        _total(row),
        (unit(_end_bytes(row)), index),
        (4, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=8,
        color=FAILED if failed else INK,
        weight="bold" if row["is_baseline"] else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        zorder=5,
        gid="total",
    )
