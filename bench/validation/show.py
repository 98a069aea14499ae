"""Outcomes as tables, as JSON, and as the published page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from bench.validation.calibration import derive
from bench.validation.outcome import Outcome, spreads
from bench.validation.traces import Replayed, lines

PAGE = """# How near predictions come

Measurements that others published, each predicted on the virtual card (`oombench validate`). A figure of the target
table was derived from the rows marked with a star; families count only the rows held out. *Too low* counts
under-predictions.

## By family

{families}

## Row by row

{rows}
"""


def derived() -> str:
    """The figures of the target table that follow from published rows: derived anew, and as the table has them."""
    figures = [[name, *(f"{value:.4g}" for value in values)] for name, values in derive().items()]
    return table(["figure", "derived", "table"], figures)


def as_json(outcomes: Sequence[Outcome], traces: Sequence[Replayed] = ()) -> str:
    """Rows, families and recorded traces, as a JSON document."""
    rows = [
        {
            "id": outcome.row.id,
            "family": outcome.family,
            "predicted": outcome.predicted,
            "published": outcome.row.value,
            "unit": outcome.row.unit,
            "error": outcome.error,
            "tolerance": outcome.row.tolerance.text,
            "holds": outcome.holds,
            "held_out": outcome.held_out,
            "source": outcome.row.source,
        }
        for outcome in outcomes
    ]
    recorded = [
        {"trace": trace.name, "events": trace.events, "exact": trace.exact}
        | {name: simulated for name, (_, simulated) in trace.figures.items() if name != "segments"}
        for trace in traces
    ]
    families = [asdict(spread) for spread in spreads(outcomes)]
    return json.dumps({"rows": rows, "families": families, "traces": recorded}, indent=1)


def as_tables(outcomes: Sequence[Outcome], traces: Sequence[Replayed] = ()) -> str:
    """One line per row, then one per family, then one per recorded trace."""
    note = "* a figure of the target table was derived from this row; families count the rows held out"
    recorded = [table(*lines(traces))] if traces else []
    return "\n\n".join((table(*_rows(outcomes)), note, table(*_families(outcomes)), *recorded))


def publish(outcomes: Sequence[Outcome], folder: Path, traces: Sequence[Replayed] = ()) -> list[Path]:
    """Write accuracy.md and accuracy.csv into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, sheet = folder / "accuracy.md", folder / "accuracy.csv"
    frames = [pd.DataFrame(lines, columns=heads) for heads, lines in (_families(outcomes), _rows(outcomes))]
    families, rows = (frame.to_markdown(index=False, disable_numparse=True) for frame in frames)
    recorded = pd.DataFrame(lines(traces)[1], columns=lines(traces)[0]).to_markdown(index=False, disable_numparse=True)
    part = f"\n## Recorded allocator traces\n\n{recorded}\n" if traces else ""
    page.write_text(PAGE.format(families=families, rows=rows) + part, encoding="utf-8")
    pd.DataFrame(json.loads(as_json(outcomes))["rows"]).to_csv(sheet, index=False)
    return [page, sheet]


def _rows(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    heads = ["row", "predicted", "published", "unit", "error", "tolerance", "holds"]
    lines = [
        [
            outcome.row.id + ("" if outcome.held_out else " *"),
            f"{outcome.predicted:.6g}",
            f"{outcome.row.value:.6g}",
            outcome.row.unit,
            f"{outcome.error:+.2%}",
            outcome.row.tolerance.text,
            "yes" if outcome.holds else "MISS",
        ]
        for outcome in outcomes
    ]
    return heads, lines


def _families(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    heads = ["family", "rows", "missed", "held out", "median", "p90", "worst", "too low", "lowest by"]
    lines = [
        [
            spread.family,
            str(spread.rows),
            str(spread.missed),
            str(spread.held_out),
            *(f"{error:.2%}" for error in (spread.median, spread.p90, spread.worst)),
            str(spread.too_low),
            f"{spread.lowest_by:.2%}",
        ]
        for spread in spreads(outcomes)
    ]
    return heads, lines


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Plain text in columns."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = (heads, ["-" * width for width in widths], *rows)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
