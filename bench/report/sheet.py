"""What both plots share: a sheet with a title, one axes, a legend and a footnote, and the placing of labels.

Figures are drawn without pyplot: no window, no backend to choose, no global list of figures. Everything stands at a
fixed place, in inches, so the same table gives the same file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.record import Status
from bench.report.frame import SOURCES, Row
from bench.report.table import GIB, MIB, bytes_text

STYLE: Any = {
    **sns.axes_style("whitegrid"),
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.0,
    "axes.edgecolor": "0.6",
    "axes.labelsize": 9.0,
    "grid.color": "0.9",
    "hatch.linewidth": 0.8,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}
WIDTH_IN, DPI = 9.0, 150  # some 900 px wide in a page, and sharp on a dense screen
TOP_IN, BOTTOM_IN, LINE_IN, MARGIN_IN = 0.74, 1.0, 0.165, 0.15
PALETTE = sns.color_palette("colorblind")
CARD, FAILED, INK, FAINT = "0.35", PALETTE[3], "0.1", "0.35"

Spot = tuple[float, float]
Box = tuple[float, float, float, float]


class Unit(NamedTuple):
    """The unit of a memory axis."""

    size_bytes: int
    name: str

    @classmethod
    def of(cls, largest_bytes: float) -> Unit:
        """The one that suits an axis up to `largest_bytes`."""
        return cls(GIB, "GiB") if largest_bytes >= 0.1 * GIB else cls(MIB, "MiB")

    def __call__(self, number_bytes: float) -> float:
        """A number of bytes in this unit."""
        return number_bytes / self.size_bytes


@dataclass(frozen=True)
class Sheet:
    """A figure with one axes.

    Attributes:
        figure: Not known to pyplot.
        axes: The only one.
        height_in: Height of the figure.
        footnote: Lines at its foot.
    """

    figure: Figure
    axes: Axes
    height_in: float
    footnote: Sequence[str]

    @classmethod
    def new(
        cls, found: Sequence[Row], drawn: Sequence[Row], what: str, height_in: float, box_in: tuple[float, float]
    ) -> Sheet:
        """A sheet with its title; the rows of `found` that are not `drawn` are named in the footnote.

        Args:
            found: All rows of the table.
            drawn: The rows that the plot shows.
            what: What the plot shows.
            height_in: Height without the footnote.
            box_in: Left edge and width of the axes.
        """
        footnote = _footnote(found, drawn)
        height_in += LINE_IN * len(footnote)
        bottom_in = BOTTOM_IN + LINE_IN * len(footnote)
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI)
        left, width = (x_in / WIDTH_IN for x_in in box_in)
        axes = figure.add_axes((left, bottom_in / height_in, width, (height_in - bottom_in - TOP_IN) / height_in))
        axes.set_axisbelow(True)
        sheet = cls(figure, axes, height_in, footnote)
        sources = " and ".join(source for source in SOURCES if any(row["source"] == source for row in drawn))
        first = found[0]
        title = f"{first['name']} on {first['target']}: {what} ({sources})"
        sheet.text(MARGIN_IN, 0.26, title, gid="title", fontsize=11, weight="bold")
        preset = f"preset {first['preset']}" + (f", {first['variant']}" if first["variant"] else "")
        sheet.text(MARGIN_IN, 0.46, preset, fontsize=8.5, color=FAINT)
        for index, line in enumerate(footnote, start=1):
            sheet.text(
                MARGIN_IN,
                height_in - 0.09 - LINE_IN * (len(footnote) - index),
                line,
                "footnote",
                color=FAINT,
                fontsize=8,
            )
        return sheet

    def text(self, x_in: float, y_in: float, text: str, gid: str | None = None, **style: Any) -> None:
        """Text at a distance from the upper left corner."""
        self.figure.text(x_in / WIDTH_IN, 1 - y_in / self.height_in, text, gid=gid, **style)

    def card(self, capacity_bytes: int | None, unit: Unit, shade: bool = False) -> list[Box]:
        """The card's capacity as a line, or as a remark where that would be far off the axes; where the line runs."""
        if not capacity_bytes:
            return []
        axes, said = self.axes, f"card: {bytes_text(capacity_bytes)}"
        x, (_, right) = unit(capacity_bytes), axes.get_xlim()
        style: dict[str, Any] = {"textcoords": "offset points", "color": CARD, "fontsize": 8, "gid": "card"}
        if x > right:
            axes.annotate(f"{said}, off the scale →", (1, 1), (0, 5), xycoords="axes fraction", ha="right", **style)
            return []
        across = axes.get_xaxis_transform()
        axes.axvline(x, color=CARD, linewidth=1.5, zorder=1.5, gid="capacity")
        axes.annotate(said, (x, 1), (0, 5), xycoords=across, ha="center", **style)
        if shade:
            axes.axvspan(x, right, color="0.93", zorder=0)
        (left_px, lower_px), (right_px, upper_px) = across.transform([(x, 0), (x, 1)])
        return [(left_px - 2, lower_px, right_px + 2, upper_px)]

    def legend(self, swatches: Mapping[str, Any] | None = None) -> None:
        """Below the axes: the swatches, colours by name, then every label of an artist once."""
        handles, names = self.axes.get_legend_handles_labels()
        shown = {name: Patch(color=colour) for name, colour in (swatches or {}).items()}
        shown |= dict(zip(names, handles, strict=True))
        self.figure.legend(
            list(shown.values()),
            list(shown),
            loc="lower left",
            bbox_to_anchor=(0.05 / WIDTH_IN, (0.06 + LINE_IN * len(self.footnote)) / self.height_in),
            ncol=4 if len(shown) <= 4 else -(-len(shown) // 2),
            frameon=False,
            handletextpad=0.5,
            columnspacing=1.4,
            handlelength=1.6,
        )


def _footnote(found: Sequence[Row], drawn: Sequence[Row]) -> list[str]:
    """The rows that a plot cannot show, and why, in lines that fit."""
    absent = [row for row in found if row not in drawn]
    several = len({row["source"] for row in found}) > 1
    named = [
        f"{row['configuration']} ({row['source'] + ', ' if several else ''}"
        f"{'no figures' if row['status'] == Status.OK else row['status']})"
        for row in absent
    ]
    return textwrap.wrap(f"Not drawn: {', '.join(named)}.", 150) if absent else []


def save(figure: Figure, path: Path) -> None:
    """Write a PNG that holds nothing but the picture: no software version, no time."""
    with mpl.rc_context(STYLE):
        figure.savefig(path, dpi=DPI, metadata={"Software": None})


def place(spots: Sequence[Spot], sizes: Sequence[Spot], marker: float, avoid: Sequence[Box], within: Box) -> list[Spot]:
    """Centres for labels beside their spots, such that they cover neither markers nor each other, where that can be.

    Greedy: each label in turn takes the nearest of 8 directions at growing distance that covers the least.

    Args:
        spots: What is labelled.
        sizes: Width and height of each label.
        marker: Half the width of the marker at a spot.
        avoid: What a label may rather cover, such as a line.
        within: Left, lower, right and upper bound, to be kept.
    """
    taken = [_box(spot, 2 * marker, 2 * marker) for spot in spots]
    directions = ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
    centres: list[Spot] = []
    for (x, y), (width, height) in zip(spots, sizes, strict=True):
        costs: dict[Spot, float] = {}
        for ring in range(1, 7):
            reach = marker * (0.4 + 0.9 * ring)
            for dx, dy in directions:
                centre = (x + dx * (reach + width / 2), y + dy * (reach + height / 2))
                box = _box(centre, width, height)
                covered = sum(_common(box, other) for other in taken) + width * height - _common(box, within)
                crossed = sum(_common(box, other) for other in avoid)
                costs[centre] = 10 * covered + crossed + 0.08 * width * height * ring
        centres.append(min(costs, key=lambda centre: costs[centre]))
        taken.append(_box(centres[-1], width, height))
    return centres


def _box(centre: Spot, width: float, height: float) -> Box:
    return centre[0] - width / 2, centre[1] - height / 2, centre[0] + width / 2, centre[1] + height / 2


def _common(one: Box, other: Box) -> float:
    """Area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)
