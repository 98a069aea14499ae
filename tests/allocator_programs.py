"""Programs for a caching allocator, made up by hypothesis: what is asked of it, how it is set, and how it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import strategies as st

from bench.vgpu.allocator import AllocatorConfig, Block, CachingAllocator, OutOfMemory

MIB = 2**20
CAPACITY_BYTES = 160 * MIB

CONFIGS = {
    "default": AllocatorConfig(),
    "expandable": AllocatorConfig(expandable_segments=True),
    "max_split": AllocatorConfig(max_split_size_bytes=24 * MIB),
    "expandable max_split": AllocatorConfig(expandable_segments=True, max_split_size_bytes=24 * MIB),
    "collecting": AllocatorConfig(garbage_collection_threshold=0.4, per_process_memory_fraction=0.9),
    "rounding": AllocatorConfig(roundup_power2_divisions=4),
}

Operation = tuple[str, int, int]
"""What to do; a size in bytes, or which of those there are; a stream."""

_sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(MIB - 1024, MIB + 1024),
    st.integers(1, 40).map(lambda mebibytes: mebibytes * MIB // 2),
    st.integers(1, 60 * MIB),
)
_streams = st.integers(0, 2)
_picks = st.integers(0, 1000)
_operation = st.one_of(
    st.tuples(st.just("allocate"), _sizes, _streams),
    st.tuples(st.just("allocate"), _sizes, _streams),
    st.tuples(st.just("free"), _picks, st.just(0)),
    st.tuples(st.just("free"), _picks, st.just(0)),
    st.tuples(st.just("record"), _picks, _streams),
    st.tuples(st.just("pass"), _picks, st.just(0)),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
)
operations = st.lists(_operation, min_size=25, max_size=60)
configs = st.sampled_from(sorted(CONFIGS)).map(CONFIGS.__getitem__)


class Point:
    """A point on a stream, passed when an operation says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Program:
    """Runs operations on an allocator; a request that fails is left out, as a program could do.

    Attributes:
        allocator: What `make` makes, given what records a point on a stream.
        live: The blocks that it has handed out.
        points: The points that it has recorded.
        refused: How many requests failed.
    """

    def __init__(self, make: Callable[[Callable[[int], Point]], CachingAllocator]) -> None:
        self.live: list[Block] = []
        self.points: list[Point] = []
        self.refused = 0
        self.allocator = make(self._point)

    def _point(self, _stream: int) -> Point:
        self.points.append(Point())
        return self.points[-1]

    def run(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            self.do(operation)

    def do(self, operation: Operation) -> None:
        action, number, stream = operation
        if action == "allocate":
            try:
                self.live.append(self.allocator.allocate(number, stream))
            except OutOfMemory:
                self.refused += 1
        elif action == "empty":
            self.allocator.empty_cache()
        elif action == "pass" and self.points:
            self.points[number % len(self.points)].done = True
        elif self.live and action == "free":
            self.allocator.free(self.live.pop(number % len(self.live)))
        elif self.live and action == "record":
            self.allocator.record_stream(self.live[number % len(self.live)], stream)
