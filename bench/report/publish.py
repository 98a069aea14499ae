"""Tables and plots of a set of records, written into one folder per target."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from bench.record import Record, Status
from bench.report import plots, table
from bench.report.frame import SOURCES, Row, rows, tidy
from bench.report.sheet import save

PLOTS = {"pareto": "Memory against throughput", "memory": "What the peak is made of"}
SUMMARY = "summary.md"
LISTING = "Every figure: [{stem}.md]({stem}.md), [{stem}.csv]({stem}.csv)."
"""How a summary lists the files of a table; a later publication knows by these lines what is its to remove."""

_LISTED = re.compile(r"^Every figure: \[([\w.-]+)\.md\]\(\1\.md\), \[\1\.csv\]\(\1\.csv\)\.$", re.MULTILINE)


class Section(NamedTuple):
    """One table of a target: its rows and the stem of its files."""

    stem: str
    frame: pd.DataFrame


def publish(
    records: Iterable[Record],
    folder: Path,
    baselines: Mapping[str, Mapping[str, Any]],
    capacities: Mapping[str, int] | None = None,
) -> list[Path]:
    """Write `folder`/<target>/ for every target: per workload a page, a CSV and two plots, and a summary of them all.

    Args:
        records: In the order of the store; of several for one configuration and source, the last counts.
        folder: Created where it is missing, as in "results".
        baselines: Every technique's value in the plain configuration, by workload path.
        capacities: Usable bytes of a card, by target.

    What the summary that was there before lists, and this publication does not write, is removed.

    Returns:
        What was written, by name.

    Raises:
        BadInput: A record's workload has no baseline, or its categories exceed its peak.
    """
    frame = tidy(records, baselines, capacities)
    written: list[Path] = []
    for target, of_target in frame.groupby("target", sort=True):
        inside = folder / str(target)
        inside.mkdir(parents=True, exist_ok=True)
        parts = sections(of_target)
        of_parts = [path for section in parts for path in _write_section(section, inside)]
        for path in _published(inside) - set(of_parts):
            path.unlink(missing_ok=True)
        page = summary(parts, {path.name for path in of_parts})
        written += [*of_parts, _write(inside / SUMMARY, page)]
    return sorted(written)


def _published(inside: Path) -> set[Path]:
    """The files of the tables that the summary in a folder lists; nobody else's files are among them."""
    try:
        page = (inside / SUMMARY).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return set()
    return {path for stem in _LISTED.findall(page) for path in _files(inside, stem)}


def _files(inside: Path, stem: str) -> list[Path]:
    """Every file that a table can have."""
    return [inside / f"{stem}{end}" for end in (".md", ".csv", *(f"_{name}.png" for name in PLOTS))]


def sections(of_target: pd.DataFrame) -> list[Section]:
    """One per workload, preset and settings; the stem names the settings only where a preset was run with several."""
    found = []
    for key, part in of_target.groupby(["name", "preset", "variant"], sort=True):
        name, preset, variant = (str(word) for word in key)
        words = [name, preset, *([variant] if variant else [])]
        found.append(Section("_".join(re.sub(r"[^\w.]+", "-", word) for word in words), part))
    return found


def _write_section(section: Section, inside: Path) -> list[Path]:
    written = [
        _write(inside / f"{section.stem}.md", table.markdown(section.frame)),
        _write(inside / f"{section.stem}.csv", table.csv(section.frame)),
    ]
    for name, draw in zip(PLOTS, (plots.pareto_figure, plots.memory_figure), strict=True):
        figure = draw(section.frame)
        if figure is not None:
            save(figure, inside / f"{section.stem}_{name}.png")
            written.append(inside / f"{section.stem}_{name}.png")
    return written


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def summary(parts: list[Section], drawn: Iterable[str] = ()) -> str:
    """What someone with this card acts on: what fits, what of it is fastest, what is smallest.

    Args:
        parts: The tables of one target.
        drawn: Names of the plots there are, which are embedded.
    """
    first = rows(parts[0].frame)[0]
    card = f" ({table.bytes_text(first['capacity_bytes'])} usable)" if first["capacity_bytes"] else ""
    paragraphs = [f"# What fits on {first['target']}{card}", _overview(parts)]
    for section in parts:
        paragraphs += _summarised(section, drawn)
    return "\n\n".join(paragraphs) + "\n"


def _title(section: Section) -> str:
    first = rows(section.frame)[0]
    return f"{first['name']}, preset {first['preset']}" + (f", {first['variant']}" if first["variant"] else "")


def _overview(parts: list[Section]) -> str:
    """A line per table and source."""
    lines = []
    for section in parts:
        for source, found in _by_source(section.frame).items():
            fitting = _fitting(found)
            lines.append(
                {
                    "workload": _title(section),
                    "source": source,
                    "baseline": next((table.outcome_text(row) for row in found if row["is_baseline"]), "not run"),
                    "fit": f"{len(fitting)} of {len(found)}",
                    "fastest that fits": _named(fastest(fitting)),
                    "smallest that fits": _named(smallest(fitting)),
                }
            )
    return table.grid(lines)


def _named(row: Row | None) -> str:
    return table.NONE if row is None else row["configuration"]


def _by_source(frame: pd.DataFrame) -> dict[str, list[Row]]:
    found = rows(frame)
    by_source = {source.value: [row for row in found if row["source"] == source] for source in SOURCES}
    return {source: of_source for source, of_source in by_source.items() if of_source}


def _fitting(found: list[Row]) -> list[Row]:
    return [row for row in found if row["status"] == Status.OK]


def fastest(fitting: Iterable[Row]) -> Row | None:
    """The one with the lowest step time per item; per item, or a smaller batch would always win."""
    timed = [row for row in fitting if row["items_per_s"]]
    return max(timed, key=lambda row: row["items_per_s"], default=None)


def smallest(fitting: Iterable[Row]) -> Row | None:
    """The one with the lowest peak."""
    sized = [row for row in fitting if row["allocated_bytes"] is not None]
    return min(sized, key=lambda row: row["allocated_bytes"], default=None)


CHOICES: dict[str, Callable[[list[Row]], Row | None]] = {
    "fastest that fits": fastest,
    "fastest with the same gradient": lambda fitting: fastest(filter(_keeps_gradient, fitting)),
    "smallest that fits": smallest,
    "smallest with the same gradient": lambda fitting: smallest(filter(_keeps_gradient, fitting)),
}
OPEN = ("fastest that fits", "smallest that fits")
TOLD = ("allocated", "reserved", "saving", "step time", "throughput", "cost", "gradient")


def _keeps_gradient(row: Row) -> bool:
    return row["is_baseline"] or row["gradient"] in ("exact", "rounding")


def _summarised(section: Section, drawn: Iterable[str]) -> list[str]:
    by_source = _by_source(section.frame)
    paragraphs = [f"## {_title(section)}", table.lead(section.frame), *table.remarks(section.frame)]
    choices = [line for found in by_source.values() for line in _choices(found)]
    paragraphs += [table.grid(choices)] if choices else []
    paragraphs += [_fit_and_not(source, found) for source, found in by_source.items()]
    paragraphs += [
        f"![{text}]({section.stem}_{name}.png)" for name, text in PLOTS.items() if f"{section.stem}_{name}.png" in drawn
    ]
    return [
        *paragraphs,
        LISTING.format(stem=section.stem),
    ]


def _choices(found: list[Row]) -> list[dict[str, str]]:
    """What to take, by what is wanted; a choice that is already named is not named again."""
    chosen: dict[str, Row] = {}
    for choice, choose in CHOICES.items():
        row = choose(_fitting(found))
        if row is not None and (choice in OPEN or row not in chosen.values()):
            chosen[choice] = row
    return [
        {"choice": choice, "configuration": row["configuration"], "source": row["source"]}
        | {name: table.PRINTED[name](row) for name in TOLD}
        for choice, row in chosen.items()
    ]


def _fit_and_not(source: str, found: list[Row]) -> str:
    """Every configuration by outcome, in the order of the table."""
    fitting = [row["configuration"] for row in _fitting(found)]
    lines = [f"- Fits ({source}): {'; '.join(fitting) or 'none'}."]
    for status, said in (
        (Status.OOM, "Runs out of memory"),
        (Status.TIMEOUT, "Ran into the time limit"),
        (Status.CRASH, "Crashed"),
        (Status.REFUSED, "Cannot be applied"),
    ):
        named = [f"{row['configuration']} ({table.reason_text(row)})" for row in found if row["status"] == status]
        lines += [f"- {said} ({source}): {'; '.join(named)}."] if named else []
    return "\n".join(lines)
