"""Reading snapshot files, which may come from anybody."""

from __future__ import annotations

import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
from snapshot_tools import MIB, Recording, block, event, frame, segment, write

from bench import snapshot as snapshot_module
from bench.errors import BadInput
from bench.frames import made
from bench.moment import Moment
from bench.snapshot import read_snapshot


def recorded() -> dict[str, Any]:
    recording = Recording()
    with recording.running():
        first = recording.allocator.allocate(3 * MIB)
        recording.allocator.allocate(700)
        recording.allocator.free(first)
        return recording.content()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    snapshot = read_snapshot(write(tmp_path / "s.pickle", recorded()))
    assert (snapshot.name, snapshot.device, snapshot.target, snapshot.capacity_bytes) == ("s.pickle", 0, "test", 2**40)
    assert (snapshot.reserved_bytes, snapshot.allocated_bytes) == (22 * MIB, 1024)
    actions = [each.action for each in snapshot.events]
    frees = ["free_requested", "free_completed"]
    assert actions == ["segment_alloc", "alloc", "segment_alloc", "alloc", *frees]
    assert [each.small for each in snapshot.segments] == [False, True]


def test_older_forms_are_read(tmp_path: Path) -> None:
    old = segment(2**40, block(2**40, MIB, MIB), block(2**40 + MIB, MIB, 0))
    for each in old["blocks"]:
        del each["address"], each["requested_size"], each["frames"]
    snapshot = read_snapshot(write(tmp_path / "old.pickle", [old]))
    assert (snapshot.events, snapshot.reserved_bytes, snapshot.allocated_bytes) == ([], 2 * MIB, MIB)


def test_the_device_with_memory_is_the_one_that_is_read(tmp_path: Path) -> None:
    other = segment(2**40, block(2**40, MIB, MIB)) | {"device": 2}
    content = {"segments": [other], "device_traces": [[], [event("alloc", 5, 7)], []]}
    path = write(tmp_path / "two.pickle", content)
    assert read_snapshot(path).device == 1
    assert read_snapshot(path, 2).allocated_bytes == MIB
    with pytest.raises(BadInput, match="no device 0 in the snapshot: it has 1, 2"):
        read_snapshot(path, 0)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch touched",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_one_line_and_does_nothing(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(recorded() | {"x": Evil()}, protocol))
    with pytest.raises(BadInput, match="is refused: pickle with more than plain containers") as caught:
        read_snapshot(path)
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["evil.pickle"]


def test_every_truncation_is_one_line(tmp_path: Path) -> None:
    whole = pickle.dumps(recorded(), 4)
    path = tmp_path / "cut.pickle"
    for length in random.Random(0).sample(range(len(whole)), 60):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput, match=r"is refused: (truncated|damaged) pickle") as caught:
            read_snapshot(path)
        assert "\n" not in str(caught.value)


def with_(path: list[Any], value: Any) -> dict[str, Any]:
    content = recorded()
    at: Any = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (3, "it has no segments"),
        ({"device_traces": []}, "it has no segments"),
        (with_(["segments"], "x"), "segments is not a list of dicts"),
        (with_(["segments", 0, "blocks"], [1]), "blocks is not a list of dicts"),
        (with_(["segments", 0, "total_size"], 5), "do not add up"),
        (with_(["segments", 0, "total_size"], -1), "total_size is -1"),
        (with_(["segments", 0, "address"], 2**63), "address is 9223372036854775808"),
        (with_(["segments", 0, "stream"], True), "stream is True"),
        (with_(["segments", 0, "segment_pool_id"], (1,)), "a pool is a tuple"),
        (with_(["segments", 0, "blocks", 0, "state"], "gone"), "a block is 'gone'"),
        (with_(["segments", 0, "blocks", 0, "address"], 7), "do not follow each other"),
        (with_(["device_traces"], [3]), "not a list of lists"),
        (with_(["device_traces", 0, 1, "action"], None), "action is None"),
        (with_(["device_traces", 0, 1, "size"], 2**60), "size is"),
        (with_(["device_traces", 0, 1, "addr"], "x" * 10**6), "addr is 'xxx"),
        (with_(["allocator_settings"], 3), "settings are not a dict"),
    ],
)
def test_other_content_is_named_in_a_short_line(content: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a memory snapshot: ") as caught:
        read_snapshot(write(tmp_path / "odd.pickle", content))
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300


def test_missing_files_and_other_things_are_named(tmp_path: Path) -> None:
    write(tmp_path / "snapshot.pickle", recorded())
    with pytest.raises(BadInput, match=r"did you mean .*snapshot\.pickle"):
        read_snapshot(tmp_path / "snapshto.pickle")
    for path, why in ((tmp_path, "is not a file"), (Path("/dev/zero"), "is not a file"), (Path("a\0b"), "cannot read")):
        with pytest.raises(BadInput, match=why):
            read_snapshot(path)


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "s.pickle", recorded())
    monkeypatch.setattr(snapshot_module, "MAX_ENTRIES", 3)
    with pytest.raises(BadInput, match="more than 3 events"):
        read_snapshot(path)
    monkeypatch.setattr(snapshot_module, "MAX_FILE_BYTES", 100)
    with pytest.raises(BadInput, match="more than the 100 that are read"):
        read_snapshot(path)


def test_a_small_file_that_stands_for_a_large_snapshot_is_refused_at_once(tmp_path: Path) -> None:
    blocks = [block(0, 1, 1)] * 1000
    content = {"segments": [segment(0, *blocks)] * 100_000}  # each of them one and the same
    start_s = time.process_time()
    with pytest.raises(BadInput, match="more than 3,000,000 blocks"):
        read_snapshot(write(tmp_path / "bomb.pickle", content))
    assert time.process_time() - start_s < 2


TORCH = frame("/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward")
OPERATOR = frame("??", 0, "at::_ops::addmm::call(at::Tensor const&)")
STORAGE = frame("??", 0, "at::_ops::empty_memory_format::call(...)")
USER = frame("/env/lib/python3.11/site-packages/mylib/model.py", 7, "forward")


def test_a_stack_tells_line_and_operator() -> None:
    allocation = made({"frames": [STORAGE, OPERATOR, TORCH, USER, frame("/x/main.py", 1, "<module>")]}, 512)
    assert allocation.line == "mylib/model.py:7 in forward"
    assert allocation.operator == "aten.addmm"
    assert (allocation.category, allocation.module) == ("(not recorded)", "(not recorded)")


def test_what_the_file_says_cannot_reach_the_terminal() -> None:
    allocation = made({"category": "a\x1b[2J\nb", "frames": [frame("/x/a\x07.py", 3, "\x1b]0;title")]}, 512)
    assert allocation.category == "a?[2J?b"
    assert allocation.line == "/x/a?.py:3 in ?]0;title"
    assert "\x1b" not in Moment("now", 0, [allocation]).text()


@pytest.mark.parametrize("frames", [None, 3, [3], [{"filename": 3, "name": None}], "ab"])
def test_odd_stacks_tell_nothing(frames: Any) -> None:
    assert made({"frames": frames}, 512).line == "(not recorded)"
