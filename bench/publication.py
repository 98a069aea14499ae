"""`oombench report`: stored records, and what a report has to know beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench.config import Cell
from bench.errors import BadInput, OombenchError
from bench.record import Record, Source
from bench.resolve import find_target, find_workload, techniques
from bench.store import Store, WriteFailed, records_at

STORE = "cells.jsonl"

WIDTH = 160
"""Columns of a table that is not printed on a terminal."""

T = TypeVar("T")


def stores_at(paths: Sequence[Path]) -> list[Path]:
    """The store files that `paths` name; without any, those of all published targets.

    Raises:
        BadInput: There is no store at one of the paths, or none at all.
    """
    if not paths:
        found = sorted(Path("results").glob(f"*/{STORE}"))
        if not found:
            raise BadInput(f"no results/*/{STORE} here: run oombench sweep first, or name a store")
        return found
    return [_store_at(path) for path in paths]


def _store_at(path: Path) -> Path:
    try:
        store = path / STORE if path.is_dir() else path
        is_there = store.exists()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    if not is_there:
        raise BadInput(f"no store at {store}")
    return store


def publish_stores(
    paths: Sequence[Path], into: Path | None, console: Console, planned: Sequence[Cell] | None = None
) -> None:
    """Publish the records of the stores into a folder per target, and list what was written.

    Args:
        paths: The stores.
        into: Where these folders are made; None for beside each store.
        console: For the list; records whose workload or target is gone are reported on stderr.
        planned: Publish only these cells, and what was measured of the same configurations; None for all.

    Raises:
        BadInput: A folder's stores have no record to publish.
        WriteFailed: A folder cannot be written.
    """
    places: dict[Path, list[Path]] = {}
    for path in paths:
        places.setdefault(_beside(path) if into is None else into, []).append(path)
    for folder, stores in places.items():
        records = [record for store in stores for record in records_at(store)]
        if planned is not None:
            records = _of_plan(records, planned)
        _publish(records, ", ".join(str(path) for path in stores), folder, console)


def print_tables(paths: Sequence[Path], planned: Sequence[Cell], console: Console) -> None:
    """Print the tables of these cells, as the stores have them."""
    from bench.report import table
    from bench.report.frame import tidy
    from bench.report.publish import sections

    records = _of_plan([record for path in paths for record in Store(path).records()], planned)
    records, baselines, capacities = _with_facts(records, ", ".join(str(path) for path in paths))
    if not console.is_terminal:
        console.width = WIDTH
    for _, of_target in tidy(records, baselines, capacities).groupby("target", sort=True):
        for section in sections(of_target):
            console.print(table.terminal(section.frame))


def _of_plan(records: Sequence[Record], planned: Sequence[Cell]) -> list[Record]:
    keys = {cell.key for cell in planned}
    configurations = {_configuration(cell.to_dict()) for cell in planned}
    return [
        record
        for record in records
        if record.key in keys or (record.source is Source.MEASURED and _configuration(record.cell) in configurations)
    ]


def _configuration(cell: Mapping[str, Any]) -> str:
    """A cell without how its numbers are got."""
    return json.dumps({name: value for name, value in cell.items() if name not in ("source", "steps")}, sort_keys=True)


def _beside(store: Path) -> Path:
    """The folder whose subfolders are targets: results, for results/rtx4090/cells.jsonl."""
    from bench.targets import TARGETS

    return store.parent.parent if store.parent.name in TARGETS else store.parent


def _publish(records: Sequence[Record], stores: str, folder: Path, console: Console) -> None:
    from bench.report.publish import publish

    records, baselines, capacities = _with_facts(records, stores)
    if not records:
        raise BadInput(f"no records in {stores} that can be published")
    try:
        written = publish(records, folder, baselines=baselines, capacities=capacities)
    except OSError as error:
        raise WriteFailed(f"cannot write {error.filename or folder}: {error.strerror}") from error
    for path in written:
        console.print(str(path), soft_wrap=True)


def _with_facts(records: Sequence[Record], stores: str) -> tuple[list[Record], dict[str, Any], dict[str, int]]:
    """The records whose workload and target are known, every workload's plain techniques, every target's bytes."""
    capacities, records = _found(records, "target", lambda name: find_target(name).capacity_bytes, stores)
    baselines, records = _found(records, "workload", lambda path: techniques(find_workload(path), {}), stores)
    return records, baselines, capacities


def _found(
    records: Sequence[Record], field: str, find: Callable[[str], T], stores: str
) -> tuple[dict[str, T], list[Record]]:
    """What `find` knows of each value of a cell's field, and the records whose value it finds; the others are told."""
    facts: dict[str, T] = {}
    by_value: dict[str, list[Record]] = {}
    for record in records:
        by_value.setdefault(str(record.cell.get(field)), []).append(record)
    for value, of_value in sorted(by_value.items()):
        try:
            facts[value] = find(value)
        except OombenchError as error:
            count = f"{len(of_value)} record{'s' * (len(of_value) > 1)}"
            print(f"{stores}: skipped {count}: {' '.join(str(error).split())}", file=sys.stderr)
    return facts, [record for record in records if str(record.cell.get(field)) in facts]
