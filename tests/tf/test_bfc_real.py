"""The simulated BFC allocator against TensorFlow's own, event by event.

TensorFlow runs in processes of its own: it and torch may never share one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.bfc import BfcAllocator, BfcExhausted, Event, replay
from bench.bfc.allocator import human_bytes, rounded
from bench.tf.allocations import CPU_ALLOCATOR, Allocation

_SPEC = importlib.util.find_spec("tensorflow")
# this folder is found as well, as a package without an origin
pytestmark = pytest.mark.skipif(_SPEC is None or _SPEC.origin is None, reason="needs TensorFlow")

ROOT = Path(__file__).parents[2]
MIB = 2**20
DEFAULT_LIMIT_BYTES = 2**16 * MIB  # of the CPU's allocator, without TF_CPU_BFC_MEM_LIMIT_IN_MB

PROLOGUE = """
import json, random, sys
from pathlib import Path
import tensorflow as tf
from bench.tf.allocations import read_trace

folder, threads = Path(sys.argv[1]), int(sys.argv[2])
tf.config.threading.set_inter_op_parallelism_threads(threads)
tf.config.threading.set_intra_op_parallelism_threads(threads)

def start():
    tf.profiler.experimental.start(str(folder))

def memory():
    return tf.config.experimental.get_memory_info("CPU:0")

def finish(**more):
    peak_bytes = memory()["peak"]
    tf.profiler.experimental.stop()
    trace = read_trace(folder)
    values = {"events": trace.events, "held": trace.held, "unknown_bytes": trace.unknown_bytes}
    print(json.dumps({**values, "peak_bytes": peak_bytes, **more}))
"""

STEP = """
start()
shapes = [(300, 700), (700, 900), (900, 10)]
weights = [tf.Variable(tf.random.normal(shape, stddev=0.05)) for shape in shapes]
biases = [tf.Variable(tf.zeros(shape[1])) for shape in shapes]
optimizer = tf.keras.optimizers.Adam()
optimizer.build(weights + biases)

@tf.function(reduce_retracing=True)
def step(inputs, labels):
    with tf.GradientTape() as tape:
        hidden = inputs
        for weight, bias in zip(weights, biases):
            hidden = tf.nn.gelu(hidden @ weight + bias)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden))
    optimizer.apply_gradients(zip(tape.gradient(loss, weights + biases), weights + biases))
    return loss

error = None
for batch in (64, 64, 200, 17, 1000, 64):
    try:
        step(tf.random.normal((batch, 300)), tf.zeros((batch,), tf.int32))
    except tf.errors.ResourceExhaustedError as caught:
        error = caught.message
        break
finish(error=error)
"""

BLOCKS = """
def block(num_bytes):
    return tf.raw_ops.Empty(shape=[num_bytes], dtype=tf.uint8)
"""

RANDOM_SIZES = (
    BLOCKS
    + """
start()
draw = random.Random(0)
live = []
failed_at = error = None
for number in range(4000):
    if draw.random() < 0.55:
        try:
            live.append(block(int(2 ** draw.uniform(0, 22.5))))
        except tf.errors.ResourceExhaustedError as caught:
            failed_at, error = number, caught.message
            break
    elif live:
        del live[draw.randrange(len(live))]
finish(error=error, failed_at=failed_at)
"""
)

LARGE_SIZES = (
    BLOCKS
    + """
start()
MIB = 2**20
block(512 * MIB)  # one region, of which a hole and a fence then take all
for hole, request in ((300, 160), (287, 160), (288, 160), (320, 160), (13, 7), (14, 7)):
    gap, fence = block(hole * MIB), block((512 - hole) * MIB)
    del gap
    inside = block(request * MIB)
    del inside, fence
block(900 * MIB)
finish()
"""
)

LATE = (
    BLOCKS
    + """
kept = [block(1000), block(5 * 2**20)]
freed = [block(3000), block(700)]
before_bytes = memory()["current"]
start()
del freed
other = block(12345)
finish(before_bytes=before_bytes)
"""
)

MANY = (
    BLOCKS
    + """
start()
for _ in range(30_000):
    block(1000)
finish()
"""
)


@dataclass(frozen=True)
class Run:
    events: list[Allocation]
    held: list[Allocation]
    values: dict[str, Any]
    regions: list[tuple[int, int]]  # address and bytes, as the log gives them
    log: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @cache
    def run_once(script: str, threads: int, limit_bytes: int) -> Run:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPU_ALLOCATOR_USE_BFC": "1",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_bytes // MIB),
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CPP_VMODULE": "bfc_allocator=1",
        }
        command = [sys.executable, "-c", PROLOGUE + script, str(tmp_path_factory.mktemp("trace")), str(threads)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        values = json.loads(done.stdout)
        events, held = ([Allocation(*event) for event in values.pop(name)] for name in ("events", "held"))
        bounds = re.findall(r"Allocated memory at (0x\w+) to (0x\w+)", done.stderr)
        regions = [(int(start, 16), int(end, 16) - int(start, 16)) for start, end in bounds]
        return Run(events, held, values, regions, done.stderr)

    def run_script(script: str, threads: int = 1, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Run:
        return run_once(script, threads, limit_bytes)

    return run_script


class Recorded:
    """Gives the regions of a real run, which have to be of the sizes that are asked for."""

    def __init__(self, regions: list[tuple[int, int]]) -> None:
        self.left = list(regions)

    def alloc(self, size_bytes: int) -> int | None:
        address, real_bytes = self.left.pop(0)
        assert size_bytes == real_bytes
        return address

    def free(self, address: int, size_bytes: int) -> None:
        raise AssertionError("the CPU's allocator collects no garbage")


def twin(real: Run, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> BfcAllocator:
    return BfcAllocator(limit_bytes, growth=True, sub_allocator=Recorded(real.regions), name=CPU_ALLOCATOR)


def follow(allocator: BfcAllocator, events: list[Allocation]) -> None:
    """Do what the events say; address, chunk, bytes in use and their peak have to be those of each."""
    for number, event in enumerate(events):
        if event.allocates:
            address = allocator.allocate(event.requested_bytes)
            chunk_bytes = allocator.size_of(address)
        else:
            address = event.address
            chunk_bytes = allocator.size_of(address)
            allocator.free(address)
        simulated = (address, chunk_bytes, allocator.bytes_in_use, allocator.peak_bytes_in_use)
        real = (event.address, event.allocation_bytes, event.bytes_allocated, event.peak_bytes_in_use)
        assert simulated == real, f"event {number}: {event}"


def request_of(event: Allocation) -> tuple[int, str, str]:
    return event.requested_bytes, event.tf_op, event.shape


@pytest.mark.parametrize(
    ("script", "threads"),
    [(STEP, 1), (STEP, 4), (RANDOM_SIZES, 1), (LARGE_SIZES, 1)],
    ids=["1", "4", "random", "large"],
)
def test_every_event_is_the_real_one(run: Callable[..., Run], script: str, threads: int) -> None:
    real = run(script, threads)
    assert real.values["unknown_bytes"] == 0
    assert not real.held
    allocator = twin(real)
    follow(allocator, real.events)
    assert allocator.peak_bytes_in_use == real.values["peak_bytes"]
    assert allocator.regions() == real.regions


def test_the_traces_reach_the_rules(run: Callable[..., Run]) -> None:
    step, large = run(STEP), run(LARGE_SIZES)
    assert len(step.events) > 5000
    assert len({event.tf_op for event in step.events}) > 50
    assert any(event.allocation_bytes > rounded(event.requested_bytes) for event in step.events)
    inside = [event for event in large.events if event.allocates and event.requested_bytes in (7 * MIB, 160 * MIB)]
    assert [event.allocation_bytes // MIB for event in inside] == [160, 287, 160, 160, 13, 7]


def test_regions_double_from_2_mib(run: Callable[..., Run]) -> None:
    sizes = [size_bytes for _, size_bytes in run(STEP).regions]
    assert len(sizes) >= 5
    assert sizes == [2 * MIB * 2**number for number in range(len(sizes))]
    assert re.findall(r"Extending allocation by (\S+) bytes", run(STEP).log) == [human_bytes(size) for size in sizes]


def test_regions_grow_until_the_request_fits(run: Callable[..., Run]) -> None:
    # 2 MiB for a shape, 512 MiB exactly, and 1 GiB for 900 MiB: it was 512 MiB before, and not doubled after that
    assert [size_bytes // MIB for _, size_bytes in run(LARGE_SIZES).regions] == [2, 512, 1024]


def test_blocks_from_before_the_trace(run: Callable[..., Run]) -> None:
    real = run(LATE)
    assert {event.requested_bytes for event in real.held} >= {3000, 700}
    held_bytes = sum(event.allocation_bytes for event in real.held)
    assert real.values["unknown_bytes"] >= 5 * MIB + 1024
    assert real.values["unknown_bytes"] + held_bytes == real.values["before_bytes"]


def test_the_profiler_drops_nothing(run: Callable[..., Run]) -> None:
    real = run(MANY)
    blocks = [event for event in real.events if event.allocates and event.requested_bytes == 1000]
    assert len(blocks) == 30_000


def test_a_step_runs_out_of_memory_where_the_simulator_does(run: Callable[..., Run]) -> None:
    limit_bytes = 32 * MIB  # less than the tensors of the batch of 1000 need
    real = run(STEP, 1, limit_bytes)
    shape = re.search(r"OOM when allocating tensor with shape(\[[\d,]+\])", real.values["error"])
    assert shape is not None
    wanted_bytes = 4
    for length in json.loads(shape[1]):
        wanted_bytes *= length
    # the real allocator waits 10 s for somebody to free something, in which nothing happens
    waits = [after.time_ps - before.time_ps for before, after in zip(real.events, real.events[1:], strict=False)]
    failed_at = waits.index(max(waits)) + 1
    assert max(waits) >= 10 * 10**12
    allocator = twin(real, limit_bytes)
    follow(allocator, real.events[:failed_at])
    with pytest.raises(BfcExhausted) as caught:
        allocator.allocate(wanted_bytes)
    words = f"ran out of memory trying to allocate {human_bytes(wanted_bytes)} (rounded to {rounded(wanted_bytes)})"
    assert words in str(caught.value)
    assert f"Allocator ({CPU_ALLOCATOR}) {words}" in real.log
    follow(allocator, real.events[failed_at:])
    assert allocator.regions() == real.regions


def test_the_failing_request_is_predicted_from_a_run_without_a_limit(run: Callable[..., Run]) -> None:
    free, limit_bytes = run(RANDOM_SIZES), 100 * MIB
    events = [Event(event.address, event.requested_bytes * event.allocates) for event in free.events]
    outcome = replay(events, BfcAllocator(limit_bytes, growth=True))
    assert outcome.exhausted is not None
    predicted = free.events[outcome.events]
    limited = run(RANDOM_SIZES, 1, limit_bytes)
    assert f"OOM when allocating tensor with shape{predicted.shape} " in limited.values["error"]
    before = [request_of(event) for event in free.events[: outcome.events]]
    assert [request_of(event) for event in limited.events[: outcome.events]] == before
    assert request_of(limited.events[outcome.events]) != request_of(predicted)
