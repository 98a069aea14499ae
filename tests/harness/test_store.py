from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness_tools import Command
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.record import Peak, Record, Source, Status, Timing
from bench.store import Store, WriteFailed

exact = settings(derandomize=True, deadline=None, max_examples=60)

sizes = st.integers(min_value=0, max_value=2**40)
peaks = st.builds(Peak, sizes, sizes, st.none() | sizes, st.dictionaries(st.text(), sizes, max_size=2))
records = st.builds(
    Record,
    key=st.sampled_from(["a", "b", "c"]),
    cell=st.dictionaries(st.text(), st.none() | st.booleans() | sizes | st.text(), max_size=2),
    status=st.sampled_from(Status),
    source=st.sampled_from(Source),
    reason=st.none() | st.text(),
    steady=st.none() | peaks,
    timing=st.none() | st.builds(Timing, st.floats(0, 1e6)),
    notes=st.lists(st.text(), max_size=2),
)
# Nothing that JSON would read as an object, and no line end of its own.
junk = st.binary(max_size=20).filter(
    lambda line: b"\n" not in line and line.strip() and not line.strip().startswith(b"{")
)


@contextmanager
def store_with(content: bytes = b"") -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cells.jsonl")
        path.write_bytes(content)
        yield Store(path)


def last_of_each(found: list[Record]) -> list[Record]:
    return list({record.key: record for record in found}.values())


@exact
@given(st.lists(records, max_size=6))
def test_what_is_appended_is_read_back_the_last_of_each_key(given_records: list[Record]) -> None:
    with store_with() as store:
        for record in given_records:
            store.append(record)
        assert store.records() == last_of_each(given_records)
        assert store.problems == []


@exact
@given(st.lists(records | junk, max_size=8))
def test_damaged_lines_are_reported_by_number_kept_and_harmless(lines: list[Record | bytes]) -> None:
    with store_with() as store:
        for line in lines:
            if isinstance(line, Record):
                store.append(line)
            else:
                with store.path.open("ab") as file:
                    file.write(line + b"\n")
        content = store.path.read_bytes()
        assert store.records() == last_of_each([line for line in lines if isinstance(line, Record)])
        damaged = [number for number, line in enumerate(lines, start=1) if isinstance(line, bytes)]
        assert [problem.line for problem in store.problems] == damaged
        assert store.path.read_bytes() == content


@exact
@given(st.lists(records, min_size=1, max_size=4), records, st.data())
def test_a_writer_killed_anywhere_costs_at_most_its_own_line(
    before: list[Record], after: Record, data: st.DataObject
) -> None:
    with store_with() as store:
        ends = []
        for record in before:
            store.append(record)
            ends.append(store.path.stat().st_size)
        cut = data.draw(st.integers(0, ends[-1]))
        os.truncate(store.path, cut)
        torn = store.path.read_bytes()
        store.append(after)
        # A line that lacks only its line end is whole.
        whole = [record for record, end in zip(before, ends, strict=True) if end - 1 <= cut]
        assert store.records() == last_of_each([*whole, after])
        assert store.path.read_bytes().startswith(torn)
        assert len(store.problems) <= 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "no JSON object"),
        ('{"key": "a"}', "not a record"),
        ('{"key": "a", "cell": {}, "status": "fine", "source": "measured"}', "'fine' is not a valid Status"),
        ('{"key": 1, "cell": {}, "status": "ok", "source": "measured"}', "key or cell of another type"),
        ('{"key": "a", "cell": {}, "status": "ok", "source": "measured", "colour": 1}', "colour"),
    ],
)
def test_a_damaged_line_is_named_with_its_place(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text("\n" + line + "\n")
    store = Store(path)
    assert store.records() == []
    [problem] = store.problems
    assert str(problem).startswith(f"{path}:2: skipped: ")
    assert why in str(problem)
    assert "\n" not in str(problem)


def test_a_store_that_is_not_there_is_empty_and_made_by_the_first_append(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "cells.jsonl")
    assert store.records() == []
    assert not store.path.parent.exists()
    store.append(record_of("a"))
    assert [record.key for record in store.records()] == ["a"]


@pytest.mark.parametrize("command", [("run", "-m", "workload.path=fake_cells:Fake"), ("report",)])
def test_a_store_that_cannot_be_looked_at_is_one_line(command: tuple[str, ...], oombench: Command) -> None:
    name = "x" * 300
    answer = oombench(*command, name if command == ("report",) else f"store={name}")
    assert answer.status == 2
    assert answer.err == [f"oombench: cannot read {name}: File name too long"]


def test_a_record_is_one_line_of_plain_json(tmp_path: Path) -> None:
    store = Store(tmp_path / "cells.jsonl")
    store.append(record_of("a", reason="one\ntwo\u2028three"))
    [line] = store.path.read_text().splitlines()
    assert json.loads(line)["reason"] == "one\ntwo\u2028three"


def test_a_line_that_does_not_fit_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "cells.jsonl")
    store.append(record_of("a"))
    before = store.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))  # room for a part of the next line
    try:
        with pytest.raises(WriteFailed, match=r"cannot write .*cells\.jsonl: File too large"):
            store.append(record_of("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.path.read_bytes() == before


def test_a_full_disk_is_one_line_and_status_1(oombench: Command) -> None:
    answer = oombench("run", "workload.path=fake_cells:Fake", "store=/dev/full")
    assert answer.status == 1
    assert answer.err[-1] == "oombench: cannot write /dev/full: No space left on device"


def test_a_store_in_a_wrong_place_is_said_before_a_cell_runs(oombench: Command, place: Path) -> None:
    (place / "file").touch()
    words = ("workload.path=fake_cells:Fake", f"workload.folder={place}", "store=file/cells.jsonl")
    answer = oombench("run", *words)
    assert (answer.status, answer.out) == (1, [])
    assert len(answer.err) == 1
    assert not list(place.glob("started-*"))


def record_of(key: str, reason: str | None = None) -> Record:
    return Record(key=key, cell={}, status=Status.OK, source=Source.PREDICTED, reason=reason)
