"""`torch.vgpu.memory`: recorded history and snapshots, opened by torch's own functions."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.cuda import _memory_viz

import bench.vgpu as vgpu
from bench.difference import moment_of
from bench.snapshot import read_snapshot
from bench.vgpu.attribution import UNKNOWN
from bench.what_if import what_if

MIB = 2**20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x))


@pytest.fixture
def memory() -> Iterator[Any]:
    with vgpu.virtual_gpu("k80"):
        yield torch.vgpu.memory


@pytest.fixture
def snapshot(memory: Any) -> dict[str, Any]:
    """After two training steps, recorded from the first allocation on."""
    memory._record_memory_history()
    run()
    return memory._snapshot()  # type: ignore[no-any-return]


def run() -> None:
    model = Net().to("vgpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(512, 256, device="vgpu")).sum().backward()
        optimizer.step()
    KEPT.extend((model, optimizer))


KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    KEPT.clear()


def test_totals_equal_memory_stats(snapshot: dict[str, Any]) -> None:
    stats = torch.vgpu.memory_stats()
    segments = snapshot["segments"]
    assert sum(each["total_size"] for each in segments) == stats["reserved_bytes.all.current"]
    assert sum(each["allocated_size"] for each in segments) == stats["allocated_bytes.all.current"]
    assert sum(each["active_size"] for each in segments) == stats["active_bytes.all.current"]
    assert sum(each["requested_size"] for each in segments) == stats["requested_bytes.all.current"]
    assert len(segments) == stats["segment.all.current"]
    small = sum(each["total_size"] for each in segments if each["segment_type"] == "small")
    assert small == stats["reserved_bytes.small_pool.current"]


def test_the_trace_adds_up_to_the_counters(snapshot: dict[str, Any]) -> None:
    stats = torch.vgpu.memory_stats()
    [trace] = snapshot["device_traces"]
    counts = Counter(each["action"] for each in trace)
    sums: Counter[str] = Counter()
    for each in trace:
        sums[each["action"]] += each["size"]
    assert counts["alloc"] == stats["allocation.all.allocated"]
    assert counts["free_requested"] == counts["free_completed"] == stats["allocation.all.freed"]
    assert counts["segment_alloc"] == stats["num_device_alloc"]
    assert sums["alloc"] == stats["requested_bytes.all.allocated"]
    assert sums["alloc"] - sums["free_completed"] == stats["requested_bytes.all.current"]
    assert sums["segment_alloc"] == stats["reserved_bytes.all.allocated"]
    times = [each["time_us"] for each in trace]
    assert times == sorted(times)


def test_every_event_has_the_keys_that_torch_writes(snapshot: dict[str, Any]) -> None:
    keys = {"action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "pool_id", "frames"}
    for each in snapshot["device_traces"][0]:
        assert each.keys() >= keys
        assert each["frames"]
        assert not each["frames"][0]["filename"].endswith("bench/vgpu/memory.py")
    assert snapshot.keys() >= {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert snapshot["allocator_settings"]["expandable_segments"] is False
    assert len(snapshot["allocator_settings"]["roundup_power2_divisions"]) == 16


def test_torchs_own_functions_open_it(snapshot: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    stats = torch.vgpu.memory_stats()
    total = _memory_viz.Bytes(stats["reserved_bytes.all.current"])
    assert f"total_reserved: {total}" in _memory_viz.segsum(snapshot)
    trace = _memory_viz.trace(snapshot)
    assert trace.startswith(f"Device 0 ----------------\n{len(snapshot['device_traces'][0])} entries")
    assert trace.count("cudaMalloc") == stats["num_device_alloc"]
    flames = {name: getattr(_memory_viz, name)(snapshot, str) for name in ("segments", "memory")}
    for text in flames.values():
        sizes = [int(row.rpartition(" ")[2]) for row in text.splitlines()]
        assert sum(sizes) == stats["reserved_bytes.all.current"]
        assert "test_history.py" in text
    more = torch.empty(64 * MIB, dtype=torch.uint8, device="vgpu")
    after = torch.vgpu.memory._snapshot()
    compared = _memory_viz.compare(snapshot["segments"], after["segments"], str)
    assert [row.rpartition(" ")[2] for row in compared.splitlines()] == [str(64 * MIB)]
    assert capsys.readouterr().out.startswith("only_before = []")
    del more


@pytest.mark.parametrize("plot", ["trace_plot", "segment_plot"])
def test_its_plots_hold_the_whole_snapshot(plot: str, snapshot: dict[str, Any]) -> None:
    html = getattr(_memory_viz, plot)(snapshot)
    [data] = re.findall(r'"base64": "([^"]+)"', html)
    assert pickle.loads(base64.b64decode(data)) == snapshot
    filtered = _memory_viz.trace_plot(json.loads(json.dumps(snapshot)), filter_freed=True)
    assert "Active Memory Timeline" in filtered


VIEWER = {  # what the viewer at pytorch.org/memory_viz reads: torch/utils/viz/MemoryViz.js, unpickle
    *("APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET"),
    *("MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT"),
    *("BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST"),
    *("DICT", "SETITEM"),
}


def test_the_file_is_one_that_the_viewer_and_we_can_read(memory: Any, tmp_path: Path) -> None:
    memory._record_memory_history()
    run()
    path = tmp_path / "step.pickle"
    memory._dump_snapshot(path)
    assert {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())} <= VIEWER
    assert path.read_bytes()[:2] == b"\x80\x04"
    stats = torch.vgpu.memory_stats()
    read = read_snapshot(path)
    assert (read.reserved_bytes, read.allocated_bytes) == (
        stats["reserved_bytes.all.current"],
        stats["allocated_bytes.all.current"],
    )
    own = what_if(path, None, None, None).own
    assert (own.peak_reserved_bytes, own.peak_allocated_bytes) == (
        torch.vgpu.max_memory_reserved(),
        torch.vgpu.max_memory_allocated(),
    )


def test_blocks_say_who_made_them(snapshot: dict[str, Any]) -> None:
    blocks = [each for segment in snapshot["segments"] for each in segment["blocks"] if each["state"] != "inactive"]
    weights = [each for each in blocks if each["requested_size"] == 256 * 256 * 4]
    found = Counter((each["category"], each["module"]) for each in weights)
    for layer in range(3):
        assert found["parameters", f"Net.layers.{layer}"] == found["gradients", f"Net.layers.{layer}"] == 1
        assert found["optimizer", f"Net.layers.{layer}"] == 2
    assert all(each["frames"] for each in blocks)
    assert {each["name"] for each in weights[0]["frames"]} >= {"run", "convert"}


def test_running_out_of_memory_is_an_event(memory: Any) -> None:
    memory._record_memory_history()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**36, dtype=torch.uint8, device="vgpu")
    [event] = memory._snapshot()["device_traces"][0]
    assert (event["action"], event["size"]) == ("oom", 2**36)
    assert event["device_free"] == torch.vgpu.mem_get_info()[0]
    assert event["frames"][0]["name"] == "test_running_out_of_memory_is_an_event"


def test_a_snapshot_is_an_event_of_the_next(memory: Any) -> None:
    memory._record_memory_history()
    memory._snapshot()
    assert [each["action"] for each in memory._snapshot()["device_traces"][0]] == ["snapshot"]


def test_without_history_there_are_segments_alone(memory: Any) -> None:
    tensor = torch.empty(MIB, device="vgpu")
    snapshot = memory._snapshot()
    assert snapshot["device_traces"] == [[]]
    assert snapshot["segments"] == torch.vgpu.memory_snapshot()
    assert snapshot["segments"][0]["blocks"][0]["frames"] == []
    del tensor


def events_of(memory: Any, **options: Any) -> list[dict[str, Any]]:
    memory._record_memory_history(**options)
    tensor = torch.empty(MIB, device="vgpu")
    del tensor
    return memory._snapshot()["device_traces"][0]  # type: ignore[no-any-return]


def test_what_is_recorded_can_be_chosen(memory: Any) -> None:
    assert events_of(memory, enabled="state") == []
    assert len(events_of(memory, clear_history=True)) == 3
    assert [each["action"] for each in events_of(memory, max_entries=2, clear_history=True)] == [
        "free_requested",
        "free_completed",
    ]
    skipping = events_of(memory, skip_actions=["free_requested"], clear_history=True)
    assert [each["action"] for each in skipping] == ["alloc", "free_completed"]
    alloc, requested, _ = events_of(memory, context="alloc", clear_history=True)
    assert alloc["frames"] == requested["frames"]  # of the allocation
    alloc, requested, _ = events_of(memory, clear_history=True)
    assert alloc["frames"] != requested["frames"]
    assert "frames" not in events_of(memory, context="state", clear_history=True)[0]
    nothing = events_of(memory, context=None, clear_history=True)[0]
    assert not nothing.keys() & {"frames", "module", "category"}


def test_recording_again_carries_on_and_none_ends_it(memory: Any) -> None:
    events_of(memory)
    assert len(events_of(memory)) == 4 + 1 + 3  # the first time a segment too, and a snapshot between
    memory._record_memory_history(None)
    assert memory._snapshot()["device_traces"] == [[]]
    device = vgpu.current()
    assert (device.history, device.attribution, device.memory.watchers) == (None, None, [])


def test_the_older_arguments_work(memory: Any) -> None:
    memory._record_memory_history(True, trace_alloc_max_entries=2, trace_alloc_record_context=True)
    tensor = torch.empty(MIB, device="vgpu")
    assert len(memory._snapshot()["device_traces"][0]) == 2
    memory._record_memory_history(False)
    assert memory._snapshot()["device_traces"] == [[]]
    del tensor


@pytest.mark.parametrize(
    "options", [{"enabled": "al"}, {"context": "x"}, {"stacks": "c"}, {"skip_actions": ["freed"]}], ids=str
)
def test_unknown_words_are_refused(options: dict[str, Any], memory: Any) -> None:
    with pytest.raises(RuntimeError, match="expected"):
        memory._record_memory_history(**options)
    assert vgpu.current().history is None


def test_recording_ends_with_the_device() -> None:
    with vgpu.virtual_gpu("k80") as device:
        torch.vgpu.memory._record_memory_history()
    assert (device.history, device.attribution) == (None, None)
    with vgpu.virtual_gpu("k80"):
        assert torch.vgpu.memory._snapshot()["device_traces"] == [[]]
        assert torch.vgpu.memory.memory_allocated() == 0


def test_a_snapshot_without_attribution_says_so(memory: Any, tmp_path: Path) -> None:
    memory._record_memory_history(context=None)
    tensor = torch.empty(MIB, device="vgpu")
    memory._dump_snapshot(tmp_path / "s.pickle")
    assert moment_of(read_snapshot(tmp_path / "s.pickle"), "peak").by("line") == {UNKNOWN: 4 * MIB}
    del tensor
