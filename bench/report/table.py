"""The table of one workload on one target: Markdown page, CSV, terminal. GiB and ms appear here and nowhere before."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence

import pandas as pd
from rich.markup import escape
from rich.table import Table

from bench.record import Source, Status
from bench.report.frame import SOURCES, Row, rows

KIB, MIB, GIB = 2**10, 2**20, 2**30
NONE = "—"

LEGEND = (
    "Memory: *allocated* is what tensors take, *reserved* what the framework holds for that, *process* what nvidia-smi "
    "has, each the higher of the first step and a steady one; *first* and *steady* are the allocated peaks of the two. "
    '"> x": the run failed after it had reached x.',
    "*Saving* is allocated memory against the baseline, *cost* step time against the baseline, also per item where a "
    "configuration changes the items per step. *Gradient*: exact, the same up to rounding, or not the same training.",
    "*Fits*: with the share of the card's usable memory that is reserved. "
    "*Bound by*: what limits the largest share of a predicted step.",
    "*Source*: measured on the card, predicted on a virtual GPU, or emulated with TensorFlow's allocator on the CPU; "
    "each is compared with the baseline of its own source and framework.",
)

HOW = {
    Source.MEASURED: "measured on the card",
    Source.EMULATED: "emulated with TensorFlow's allocator on the CPU",
    Source.PREDICTED: "predicted on a virtual GPU",
}


def bytes_text(number: int | None) -> str:
    """A number of bytes in the unit that suits it: GiB, and MiB under 0.1 GiB."""
    if number is None:
        return NONE
    if number < KIB:
        return f"{number} bytes"
    for unit_bytes, unit in ((GIB, "GiB"), (MIB, "MiB")):
        if number >= 0.1 * unit_bytes:
            return f"{number / unit_bytes:,.2f} {unit}"
    return f"{number / KIB:,.2f} KiB"


def time_text(seconds: float | None) -> str:
    """Seconds, in ms."""
    if seconds is None:
        return NONE
    ms = seconds * 1e3
    return f"{ms:,.1f} ms" if ms >= 100 else f"{ms:.2f} ms" if ms >= 1 else f"{ms:.3f} ms"


def rate_text(per_s: float | None, unit: str | None) -> str:
    """A throughput with its unit."""
    if per_s is None:
        return NONE
    number = f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.3g}"
    return f"{number} {unit or 'items'}/s"


def outcome_text(row: Row) -> str:
    """Whether a configuration fits, or in short what kept it from doing so."""
    if row["status"] == Status.OK:
        if not row["capacity_bytes"] or row["reserved_bytes"] is None:
            return "yes"
        return f"yes ({_percent(row['reserved_bytes'] / row['capacity_bytes'])})"
    prefix = "no, OOM" if row["status"] == Status.OOM else row["status"]
    return f"{prefix}: {reason_text(row)}" if row["reason"] else prefix


def reason_text(row: Row) -> str:
    """The reason in short; of CUDA's long line on running out of memory, what was asked for and where."""
    reason = " ".join((row["reason"] or "no reason recorded").split())
    if row["status"] == Status.OOM and (tried := re.search(r"(?:ried|rying) to allocate ([\d.]+ ?\w+)", reason)):
        asked = re.search(r"Asked for (.+)\.$", reason)
        reason = f"tried to allocate {tried[1]}" + (f" {asked[1]}" if asked else "")
    return textwrap.shorten(reason, 120, placeholder=" …")


def saving_text(row: Row) -> str:
    """Memory saved against the baseline; what a configuration costs in memory says so."""
    if row["is_baseline"]:
        return "baseline"
    saving_bytes, floor_bytes = row["saving_bytes"], row["saving_floor_bytes"]
    if row["status"] == Status.OK and row["baseline_status"] == Status.OOM:
        return f"fits now, ≥ {bytes_text(floor_bytes)}" if floor_bytes else "fits now"
    if saving_bytes is None:
        return NONE if row["status"] != Status.OK else "n/a"
    if saving_bytes == 0:
        return "0 bytes"
    share = "" if row["saving_share"] is None else f" ({_percent(abs(row['saving_share']))})"
    if saving_bytes < 0:
        return f"costs +{bytes_text(-saving_bytes)}{share}"
    return bytes_text(saving_bytes) + share


def cost_text(row: Row) -> str:
    """Step time against the baseline, and time per item where that differs."""
    if row["is_baseline"]:
        return "baseline"
    if row["cost_share"] is None:
        return NONE if row["status"] != Status.OK else "n/a"
    per_item = row["cost_item_share"]
    if per_item is None or abs(per_item - row["cost_share"]) < 1e-9:
        return _signed(row["cost_share"])
    return f"{_signed(row['cost_share'])} ({_signed(per_item)} per item)"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %") if share >= 0.001 or share == 0 else "< 0.1 %"


def _signed(share: float) -> str:
    text = f"{share:+.1%}".replace("%", " %").replace("-", "−")  # noqa: RUF001
    return "0.0 %" if text[1:] == "0.0 %" else text


def _memory_text(name: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found = bytes_text(row[name])
        complete = row["status"] != Status.OOM or row[name] is None or (name == "first_bytes" and row["steady_bytes"])
        return found if complete else f"> {found}"

    return text


def _bound_text(row: Row) -> str:
    return NONE if row["bound"] is None else f"{row['bound']} {row['bound_share']:.0%}".replace("%", " %")


PRINTED: dict[str, Callable[[Row], str]] = {
    "configuration": lambda row: row["configuration"],
    "source": lambda row: row["source"],
    "allocated": _memory_text("allocated_bytes"),
    "reserved": _memory_text("reserved_bytes"),
    "process": _memory_text("process_bytes"),
    "first": _memory_text("first_bytes"),
    "steady": _memory_text("steady_bytes"),
    "saving": saving_text,
    "step time": lambda row: time_text(row["step_s"]),
    "throughput": lambda row: rate_text(row["items_per_s"], row["unit"]),
    "cost": cost_text,
    "gradient": lambda row: row["gradient"] or NONE,
    "fits": outcome_text,
    "bound by": _bound_text,
}
IN_TERMINAL = [name for name in PRINTED if name not in ("first", "steady", "bound by")]
NUMBERS = {"allocated", "reserved", "process", "first", "steady", "saving", "step time", "throughput", "cost"}


def lead(table: pd.DataFrame) -> str:
    """What the numbers of a table are: source, target, preset, items per step."""
    found = rows(table)
    first = found[0]
    how = [HOW[source] for source in SOURCES if any(row["source"] == source for row in found)]
    card = f" ({bytes_text(first['capacity_bytes'])} usable)" if first["capacity_bytes"] else ""
    preset = f"preset {first['preset']}" + (f" with {first['variant']}" if first["variant"] else "")
    plain = [row for row in found if row["items_per_step"] is not None]
    of_plain = f", {plain[0]['items_per_step']:,} {plain[0]['unit'] or 'items'} per step" if plain else ""
    varied = " in the baseline" if len({row["items_per_step"] for row in plain}) > 1 else ""
    sources = " (the source column tells which)" if len(how) > 1 else ""
    sentence = f"{' and '.join(how)}{sources}: {first['name']} on {first['target']}{card}, {preset}{of_plain}{varied}."
    return sentence[0].upper() + sentence[1:]


def remarks(table: pd.DataFrame) -> list[str]:
    """What has to be known about the baseline before a saving is read, for each source."""
    found = rows(table)
    told = []
    for source in [source for source in SOURCES if any(row["source"] == source for row in found)]:
        baseline = next((row for row in found if row["is_baseline"] and row["source"] == source), None)
        text = _remark(baseline)
        if text:
            told.append(text if len({row["source"] for row in found}) == 1 else f"{source.value.capitalize()}: {text}")
    return told


def _remark(baseline: Row | None) -> str:
    if baseline is None:
        return "There is no baseline row, so savings and costs are not given."
    if baseline["status"] == Status.OK:
        return ""
    if baseline["status"] != Status.OOM:
        return f"The baseline has no result, so savings and costs are not given; {outcome_text(baseline)}."
    capacity_bytes, reached_bytes = baseline["capacity_bytes"], baseline["allocated_bytes"]
    card = f"'s {bytes_text(capacity_bytes)}" if capacity_bytes else ""
    reached = f" with {bytes_text(reached_bytes)} allocated" if reached_bytes is not None else ""
    return (
        f"**The baseline needs more than the card{card}**: it ran out of memory{reached} ({reason_text(baseline)}). "
        'A saving reads "fits now, ≥ x", x being what is saved at least; there is no step time to compare with.'
    )


def notes(table: pd.DataFrame) -> list[str]:
    """The notes of the records, each once; with the configurations where only some have it."""
    found = rows(table)
    owners: dict[str, list[str]] = {}
    for row in found:
        for note in dict.fromkeys(filter(None, (row["notes"] or "").split("\n"))):
            owners.setdefault(note, []).append(row["configuration"])
    return [note + _whose(configurations, len(found)) for note, configurations in owners.items()]


def _whose(configurations: Sequence[str], total: int) -> str:
    if len(configurations) == total:
        return ""
    names = list(Counter(configurations))
    return f" ({', '.join(names) if len(names) <= 3 else f'{len(configurations)} of {total} rows'})"


def markdown(table: pd.DataFrame) -> str:
    """The page of one table: what the numbers are, the table, notes, legend."""
    found = rows(table)
    paragraphs = [f"# {found[0]['name']} on {found[0]['target']}", lead(table)]
    paragraphs += [f"Settings: {found[0]['settings']}."] if found[0]["settings"] else []
    paragraphs += remarks(table)
    paragraphs.append(grid([{name: text(row) for name, text in PRINTED.items()} for row in found]))
    told = notes(table)
    paragraphs += ["Notes:\n\n" + "\n".join(f"- {note}" for note in told)] if told else []
    paragraphs.append("\n".join(f"- {line}" for line in LEGEND))
    return "\n\n".join(paragraphs) + "\n"


def grid(cells: Sequence[dict[str, str]]) -> str:
    """A Markdown table; columns named in `NUMBERS` are set to the right."""
    escaped = pd.DataFrame([{name: text.replace("|", "\\|") for name, text in row.items()} for row in cells])
    aligned = ["right" if name in NUMBERS else "left" for name in cells[0]]
    return str(escaped.to_markdown(index=False, disable_numparse=True, colalign=aligned))


def csv(table: pd.DataFrame) -> str:
    """Every column of `frame.COLUMNS`, in bytes and seconds."""
    return table.assign(notes=table["notes"].str.replace("\n", "; ")).to_csv(index=False, lineterminator="\n")


def terminal(table: pd.DataFrame) -> Table:
    """The table for a terminal, without the columns that only the page has room for."""
    told = "\n".join(text.replace("**", "") for text in [*remarks(table), *notes(table)])
    printed = Table(title=escape(lead(table)), title_justify="left", caption_justify="left")
    printed.caption = escape(told) or None
    for name in IN_TERMINAL:
        printed.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in rows(table):
        style = "bold" if row["is_baseline"] else "red" if row["status"] != Status.OK else None
        printed.add_row(*(escape(PRINTED[name](row)) for name in IN_TERMINAL), style=style)
    return printed
