"""Records become one tidy table: a row per configuration and source, in bytes and seconds.

Report knows no workload and no target: the baseline techniques of each workload and the usable memory of each card are
passed in.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from bench.errors import BadInput
from bench.record import Peak, Record, Source, Status

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "workspace")
PARTS = (*CATEGORIES, "other")  # "other" holds what the device names otherwise, so that the parts make up the peak
SOURCES = (Source.MEASURED, Source.EMULATED, Source.PREDICTED)  # the most trusted first
OUTCOMES = (Status.OK, Status.OOM, Status.TIMEOUT, Status.CRASH, Status.REFUSED)  # the order of a table

Row = dict[str, Any]

_TEXT, _WHOLE, _REAL, _FLAG = "object", "Int64", "Float64", "bool"
COLUMNS: dict[str, str] = {
    "workload": _TEXT,  # import path
    "name": _TEXT,  # short name, unique among the workloads of the table
    "preset": _TEXT,
    "variant": _TEXT,  # settings that differ between the records of one preset; empty where none do
    "settings": _TEXT,
    "target": _TEXT,
    "capacity_bytes": _WHOLE,
    "framework": _TEXT,
    "source": _TEXT,
    "configuration": _TEXT,  # with the framework, where the table has several
    "is_baseline": _FLAG,
    "status": _TEXT,
    "reason": _TEXT,
    "allocated_bytes": _WHOLE,
    "reserved_bytes": _WHOLE,
    "process_bytes": _WHOLE,
    "peak_step": _TEXT,  # which step had the higher allocated peak: first or steady
    "first_bytes": _WHOLE,
    "steady_bytes": _WHOLE,
    "static_bytes": _WHOLE,
    **{f"{part}_bytes": _WHOLE for part in PARTS},
    "step_s": _REAL,
    "items_per_step": _WHOLE,
    "unit": _TEXT,
    "items_per_s": _REAL,
    "bound": _TEXT,
    "bound_share": _REAL,
    "saving_bytes": _WHOLE,
    "saving_share": _REAL,
    "saving_floor_bytes": _WHOLE,  # what is saved at least, where the baseline ran out of memory
    "cost_share": _REAL,  # of the step time
    "cost_item_share": _REAL,  # of the step time per item
    "baseline_status": _TEXT,
    "gradient": _TEXT,
    "notes": _TEXT,  # one a line
    "key": _TEXT,
}


def label(techniques: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """What a configuration changes against its workload's baseline: "baseline", "accumulation=4 + clip=1", ...

    A technique that `techniques` lacks counts as unchanged: the record is older than the technique.
    """
    order = [*baseline, *sorted(techniques.keys() - baseline.keys())]
    changed = [
        f"{name}={_value(techniques[name])}"
        for name in order
        if name in techniques and (name not in baseline or techniques[name] != baseline[name])
    ]
    return " + ".join(changed) or "baseline"


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def tidy(
    records: Iterable[Record],
    baselines: Mapping[str, Mapping[str, Any]],
    capacities: Mapping[str, int] | None = None,
) -> pd.DataFrame:
    """One row per configuration and source; the columns are `COLUMNS`.

    Of several records of one configuration and source the last counts: a store only grows, so it is the newest.

    Args:
        records: In the order of the store.
        baselines: Every technique's value in the plain configuration, by workload path.
        capacities: Usable bytes of a card, by target.

    Raises:
        BadInput: A record's workload has no baseline, or its categories exceed its peak.
    """
    given = list(records)
    names = short_names({record.cell["workload"]: framework(record) for record in given})
    differing = _differing_settings(given)
    newest = {tuple(_identity(record, baselines, differing).values()): record for record in given}.values()
    tables: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for record in newest:
        row = _row(record, _identity(record, baselines, differing), names)
        row["capacity_bytes"] = (capacities or {}).get(row["target"])
        tables[row["name"], row["preset"], row["variant"], row["target"]].append(row)
    rows = [row for key in sorted(tables) for row in _ordered(_told_apart(_compared(tables[key])))]
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object).astype(COLUMNS)


def rows(frame: pd.DataFrame) -> list[Row]:
    """The rows as dicts, with None for what is missing."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")  # type: ignore[return-value]


def framework(record: Record) -> str:
    """What the workload of a record is written in; records from before there were several do not say."""
    return str(record.cell.get("framework", "torch"))


def short_names(frameworks: Mapping[str, str]) -> dict[str, str]:
    """The tail of each workload's module; the whole path where two tails of one framework are equal.

    One workload in two frameworks has one name: that makes them one table.

    Args:
        frameworks: By import path.
    """
    tails = {path: (path.partition(":")[0].rpartition(".")[2], written) for path, written in frameworks.items()}
    shared = {tail for (tail, _), count in Counter(tails.values()).items() if count > 1}
    return {
        path: path.replace(".", "_").replace(":", "_") if tail in shared else tail for path, (tail, _) in tails.items()
    }


def _identity(
    record: Record, baselines: Mapping[str, Mapping[str, Any]], differing: Mapping[tuple[str, str], Sequence[str]]
) -> Row:
    """What a reader tells rows apart by: not by a technique or a setting that an older record does not have."""
    cell = record.cell
    workload, preset, settings = cell["workload"], cell["preset"], cell["settings"]
    if workload not in baselines:
        raise BadInput(f"no baseline techniques for workload {workload!r}")
    varied = {name: settings[name] for name in differing.get((workload, preset), ()) if name in settings}
    return {
        "workload": workload,
        "preset": preset,
        "variant": _listed(varied),
        "target": cell["target"],
        "framework": framework(record),
        "source": record.source.value,
        "configuration": label(cell["techniques"], baselines[workload]),
    }


def _differing_settings(records: Iterable[Record]) -> dict[tuple[str, str], list[str]]:
    """By workload and preset, the settings whose values differ, as they do where a sweep overrides one."""
    values: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in records:
        of_preset = values[record.cell["workload"], record.cell["preset"]]
        for name, value in record.cell["settings"].items():
            of_preset[name].add(json.dumps(value, sort_keys=True))
    return {key: [name for name, seen in of.items() if len(seen) > 1] for key, of in values.items()}


def _row(record: Record, identity: Row, names: Mapping[str, str]) -> Row:
    return {
        **dict.fromkeys(COLUMNS),
        **identity,
        "name": names[identity["workload"]],
        "settings": _listed(record.cell["settings"]),
        "is_baseline": identity["configuration"] == "baseline",
        "status": record.status.value,
        "reason": record.reason,
        **_memory(record),
        **_time(record),
        "gradient": record.gradient,
        "notes": "\n".join(record.notes),
        "key": record.key,
    }


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in settings.items())


def _memory(record: Record) -> Row:
    peaks = {name: peak for name, peak in (("first", record.first), ("steady", record.steady)) if peak is not None}
    if not peaks:
        return {}
    peak_step = max(peaks, key=lambda name: peaks[name].allocated_bytes)
    return {
        "allocated_bytes": peaks[peak_step].allocated_bytes,
        # What the card has to hold is the most that either step took.
        "reserved_bytes": max(peak.reserved_bytes for peak in peaks.values()),
        "process_bytes": max((p.process_bytes for p in peaks.values() if p.process_bytes is not None), default=None),
        "peak_step": peak_step,
        **{f"{name}_bytes": peak.allocated_bytes for name, peak in peaks.items()},
        "static_bytes": record.static_bytes,
        **_parts(peaks[peak_step], record.key),
    }


def _parts(peak: Peak, key: str) -> Row:
    if not peak.categories:
        return {}
    parts = {f"{name}_bytes": peak.categories.get(name, 0) for name in CATEGORIES}
    other_bytes = peak.allocated_bytes - sum(parts.values())
    if other_bytes < 0:
        raise BadInput(f"record {key}: its categories exceed its peak by {-other_bytes} bytes")
    return {**parts, "other_bytes": other_bytes}


def _time(record: Record) -> Row:
    row: Row = {"items_per_step": record.items_per_step, "unit": record.unit}
    if record.timing is None:
        return row
    row["step_s"] = record.timing.step_s
    if record.items_per_step and record.timing.step_s > 0:
        row["items_per_s"] = record.items_per_step / record.timing.step_s
    bounds = record.timing.bound_s
    total_s = sum(bounds.values())
    if total_s > 0:
        row["bound"] = max(bounds, key=lambda name: bounds[name])
        row["bound_share"] = bounds[row["bound"]] / total_s
    return row


def _compared(table: list[Row]) -> list[Row]:
    """Each row against the baseline of its own source and framework: sources are never mixed in one figure."""
    baselines = {(row["source"], row["framework"]): row for row in table if row["is_baseline"]}
    return [{**row, **_against(row, baselines.get((row["source"], row["framework"])))} for row in table]


def _told_apart(table: list[Row]) -> list[Row]:
    """With the framework in the configuration, where the table has several."""
    if len({row["framework"] for row in table}) == 1:
        return table
    return [{**row, "configuration": f"{row['framework']}: {row['configuration']}"} for row in table]


def _against(row: Row, baseline: Row | None) -> Row:
    if baseline is None:
        return {}
    found: Row = {"baseline_status": baseline["status"]}
    if row["status"] != Status.OK or row["is_baseline"]:
        return found
    if row["allocated_bytes"] is not None and baseline["allocated_bytes"] is not None:
        saving_bytes = baseline["allocated_bytes"] - row["allocated_bytes"]
        if baseline["status"] == Status.OK:
            found["saving_bytes"] = saving_bytes
            found["saving_share"] = saving_bytes / baseline["allocated_bytes"] if baseline["allocated_bytes"] else None
        elif baseline["status"] == Status.OOM:
            found["saving_floor_bytes"] = max(saving_bytes, 0)
    if baseline["step_s"] and row["step_s"]:
        found["cost_share"] = row["step_s"] / baseline["step_s"] - 1
    if baseline["items_per_s"] and row["items_per_s"]:
        found["cost_item_share"] = baseline["items_per_s"] / row["items_per_s"] - 1
    return found


def _ordered(table: list[Row]) -> list[Row]:
    """The baseline first, then by peak, failures last; the sources of one configuration side by side."""
    by_trust = sorted(table, key=lambda row: SOURCES.index(row["source"]))
    ranks: dict[str, tuple[Any, ...]] = {}
    for row in by_trust:
        outcome = OUTCOMES.index(row["status"])
        rank = (not row["is_baseline"], outcome, row["allocated_bytes"] or 0, row["configuration"])
        ranks.setdefault(row["configuration"], rank)
    return sorted(by_trust, key=lambda row: ranks[row["configuration"]])
