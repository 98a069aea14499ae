"""`oombench explain`, `diff` and `replay`: what they print, and one line for a wrong word."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snapshot_tools import MIB, Answer, Recording, write

from bench.moment import COLUMNS

Command = Callable[..., Answer]
SMALL = "workload.path=snapshot_tools:Small"


def recording(path: Path, count: int) -> Path:
    found = Recording()
    with found.running():
        kept = [found.allocator.allocate(3 * MIB) for _ in range(count)]
        found.allocator.free(kept[0])
        return write(path, found.content())


def test_explain_says_what_occupies_the_peak(oombench: Command, place: Path) -> None:
    answer = oombench("explain", SMALL, "target=k80", "--top", "3")
    assert (answer.status, answer.err) == (0, [])
    assert answer.out[0] == "snapshot_tools/small baseline @ k80"
    assert answer.out[1].startswith("peak of a step: ")
    titles = [line.rpartition("  ")[2] for line in answer.out if line.lstrip().startswith(("allocated ", "each "))]
    assert titles == [*(f"by {column}" for column in COLUMNS), "largest allocations"]
    totals = {line.split()[0] for line in answer.out if line.endswith(" total")}
    assert len(totals) == 1
    assert any("net.layers.*" in line for line in answer.out)
    assert any("snapshot_tools.py:" in line for line in answer.out)
    assert any("... and" in line and "more" in line for line in answer.out)
    assert not list(place.iterdir())


def test_explain_in_json_adds_up(oombench: Command) -> None:
    answer = oombench("explain", SMALL, "target=k80", "--json")
    found = json.loads("\n".join(answer.out))
    assert found["status"] == "ok"
    for column in COLUMNS:
        assert sum(found["by"][column].values()) == found["allocated_bytes"]
    assert {"parameters", "optimizer", "gradients"} <= found["by"]["category"].keys()
    assert found["by"]["module"]["net.layers.0"] >= 4 * 256 * 256 * 4
    largest = found["largest"][0]
    assert largest.keys() == {"count", "size_bytes", "category", "module", "operator", "line", "text"}


def test_running_out_of_memory_is_explained_and_in_the_row_if_asked(oombench: Command) -> None:
    words = (SMALL, "workload.preset=huge", "target=k80")
    answer = oombench("explain", *words)
    assert (answer.status, answer.err) == (0, [])
    assert answer.out[1].startswith("CUDA out of memory. Tried to allocate 128.00 GiB.")
    assert answer.out[2].startswith("out of memory: ")
    asked = oombench("run", *words, "store=cells.jsonl", "--explain")
    plain = oombench("run", *words, "store=cells.jsonl")
    assert asked.status == plain.status == 0
    with_text, without = [json.loads(line) for line in Path("cells.jsonl").read_text().splitlines()]
    assert with_text["explanation"].splitlines()[0] == answer.out[2]
    assert with_text["explanation"].splitlines()[1].startswith("by category: ")
    assert [line for line in asked.out if line not in plain.out] == with_text["explanation"].splitlines()
    assert without["explanation"] is None
    for record in (with_text, without):
        del record["explanation"], record["provenance"]
    assert with_text == without


def test_diff_names_what_changed_between_two_cells(oombench: Command) -> None:
    oombench("run", "-m", SMALL, "target=k80", "store=cells.jsonl", "workload.width=256,512")
    records = [json.loads(line) for line in Path("cells.jsonl").read_text().splitlines()]
    first, second = sorted(records, key=lambda record: record["cell"]["settings"]["width"])
    answer = oombench("diff", first["key"][:8], f"cells.jsonl:{second['key']}", "--store", "cells.jsonl", "--json")
    assert (answer.status, answer.err) == (0, [])
    found = json.loads("\n".join(answer.out))
    assert [side["name"] for side in found["sides"]] == [
        f"{first['key']} snapshot_tools/small baseline @ k80",
        f"{second['key']} snapshot_tools/small width=512 @ k80",
    ]
    peaks = [record["steady"]["allocated_bytes"] for record in (first, second)]
    assert [side["allocated_bytes"] for side in found["sides"]] == peaks
    assert found["allocated_bytes"] == peaks[1] - peaks[0] > 0
    for column in COLUMNS:
        assert sum(found["by"][column].values()) == found["allocated_bytes"]
        sizes = [abs(size_bytes) for size_bytes in found["by"][column].values()]
        assert sizes == sorted(sizes, reverse=True)
    assert found["remarks"] == []


def test_diff_compares_snapshots(oombench: Command, place: Path) -> None:
    recording(place / "a.pickle", 3)
    recording(place / "b.pickle", 5)
    answer = oombench("diff", "a.pickle", "b.pickle")
    assert answer.out[:3] == [
        "A: a.pickle: peak: 9.00 MiB allocated in 3 blocks, 20.00 MiB reserved",
        "B: b.pickle: peak: 15.00 MiB allocated in 5 blocks, 20.00 MiB reserved",
        "B - A: +6.00 MiB allocated",
    ]
    assert oombench("diff", "a.pickle", "b.pickle", "--at", "end").out[0].startswith("A: a.pickle: end: 6.00 MiB")


def test_replay_answers_what_would_have_been(oombench: Command, place: Path) -> None:
    recording(place / "a.pickle", 9)
    answer = oombench("replay", "a.pickle", "--alloc-conf", "expandable_segments:True", "--json")
    found = json.loads("\n".join(answer.out))
    assert found["replayed"]["end_reserved_bytes"] == found["recorded"]["end_reserved_bytes"] == 40 * MIB
    assert found["instead"]["configuration"] == "expandable_segments:True"
    assert found["instead"]["peak_reserved_bytes"] % (20 * MIB) == 0
    assert found["instead"]["failure"] is None
    text = oombench("replay", "a.pickle", "--target", "k80").out
    assert text[0] == "a.pickle: 13 events of device 0, from the first allocation on"
    assert text[2].split()[0] == "configuration"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch touched",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("replay", "a.pickel"), "did you mean 'a.pickle'?"),
        (("replay", "evil.pickle"), "is refused: pickle with more than plain containers"),
        (("diff", "a.pickle", "evil.pickle"), "is refused"),
        (("replay", "cut.pickle"), "is refused: truncated pickle"),
        (("replay", "text.pickle"), "is refused"),
        (("replay", "."), "is not a file"),
        (("replay", "a.pickle", "--alloc-conf", "expandable_segment:True"), "did you mean 'expandable_segments'?"),
        (("replay", "a.pickle", "--alloc-conf", "max_split_size_mb:1"), "at least 20 MiB"),
        (("replay", "a.pickle", "--target", "k81"), "did you mean 'k80'?"),
        (("replay", "a.pickle", "--device", "3"), "no device 3"),
        (("replay", "plain.pickle"), "has no trace"),
        (("replay",), "Missing argument"),
        (("diff", "a.pickle", "b.pickle"), "did you mean 'a.pickle'?"),
        (("diff", "a.pickle", "a.pickle", "--at", "paek"), "did you mean 'peak'?"),
        (("diff", "plain.pickle", "a.pickle", "--at", "peak"), "needs the trace"),
        (("diff", "cells.jsonl:0000", "a.pickle"), "no store at cells.jsonl"),
        (("diff", "store.jsonl:abcd", "a.pickle"), "unknown key 'abcd': did you mean 'abc'? 2 cells in store.jsonl"),
        (("diff", "store.jsonl:ab", "a.pickle"), "key 'ab' begins the keys of 2 cells: abc, abe"),
        (("diff", "store.jsonl:abc", "a.pickle"), "cell abc is damaged"),
        (("diff", "abc", "a.pickle"), "name a store"),
        (("explain", "workload=seq2seq"), "did you mean 'seq2seq_beam'?"),
        (("explain", SMALL, "target=k81"), "did you mean 'k80'?"),
        (("explain", SMALL, "source=measured"), "leave out source="),
        (("explain", SMALL, "technique.checkpointing=on"), "it has no blocks()"),
        (("run", SMALL, "explain=perhaps"), "neither true nor false"),
    ],
)
def test_a_wrong_word_is_one_line_status_2_and_nothing_written(
    words: tuple[str, ...], said: str, oombench: Command, place: Path
) -> None:
    whole = recording(place / "a.pickle", 2).read_bytes()
    (place / "cut.pickle").write_bytes(whole[: len(whole) // 2])
    (place / "evil.pickle").write_bytes(pickle.dumps(Evil()))
    (place / "text.pickle").write_text("hello")
    write(place / "plain.pickle", {"segments": []})
    rows = [{"key": key, "cell": {}, "status": "ok", "source": "predicted"} for key in ("abc", "abe")]
    (place / "store.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = sorted(place.iterdir())
    answer = oombench(*words)
    assert (answer.status, answer.out) == (2, [])
    [line] = answer.err
    assert line.startswith("oombench: ")
    assert said in line
    assert sorted(place.iterdir()) == before


def test_a_cell_that_crashes_is_one_line_and_status_1(oombench: Command) -> None:
    answer = oombench("explain", SMALL, "workload.width=-5")
    assert (answer.status, answer.out) == (1, [])
    [line] = answer.err
    assert "crash" in line
