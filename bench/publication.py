"""`oombench report`: stored records, and what a report has to know beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.errors import BadInput
from bench.record import Record
from bench.resolve import find_target, find_workload, techniques
from bench.store import WriteFailed, records_at

STORE = "cells.jsonl"


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


def publish_stores(paths: Sequence[Path], into: Path | None, console: Console) -> None:
    """Publish the records of the stores into a folder per target, and list what was written.

    Args:
        paths: The stores.
        into: Where these folders are made; None for beside each store.
        console: For the list.
    """
    places: dict[Path, list[Path]] = {}
    for path in paths:
        places.setdefault(_beside(path) if into is None else into, []).append(path)
    for folder, stores in places.items():
        _publish([record for store in stores for record in records_at(store)], stores, folder, console)


def _beside(store: Path) -> Path:
    """The folder whose subfolders are targets: results, for results/rtx4090/cells.jsonl."""
    from bench.vgpu.targets import TARGETS

    return store.parent.parent if store.parent.name in TARGETS else store.parent


def _publish(records: Sequence[Record], stores: Sequence[Path], folder: Path, console: Console) -> None:
    from bench.report.publish import publish

    if not records:
        raise BadInput(f"no records in {', '.join(str(path) for path in stores)}")
    capacities = {name: find_target(name).capacity_bytes for name in _values(records, "target")}
    baselines = {path: techniques(find_workload(path), {}) for path in _values(records, "workload")}
    try:
        written = publish(records, folder, baselines=baselines, capacities=capacities)
    except OSError as error:
        raise WriteFailed(f"cannot write {error.filename or folder}: {error.strerror}") from error
    for path in written:
        console.print(str(path), soft_wrap=True)


def _values(records: Sequence[Record], field: str) -> list[str]:
    return sorted({str(record.cell[field]) for record in records})
