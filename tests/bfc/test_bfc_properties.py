"""What holds of the BFC allocator whatever it is asked for; the book (bfc_by_the_book) gives the right answer."""

from __future__ import annotations

from bfc_by_the_book import BookAllocator
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.bfc import BfcAllocator, BfcExhausted, Card

MIB = 2**20

# small ones often collide in size, large ones reach the rule of 128 MiB; a negative number frees the block at its index
REQUESTS = st.one_of(
    st.integers(1, 2000),
    st.integers(1, 4 * MIB),
    st.sampled_from([256, 512, 768, 1024, MIB, 3 * MIB, 129 * MIB, 160 * MIB, 300 * MIB]),
)
STEP = st.one_of(REQUESTS, st.integers(-40, -1))
STEPS = st.lists(STEP, max_size=120) | st.lists(STEP, min_size=80, max_size=200)
LIMITS = st.one_of(st.integers(1, 6 * MIB), st.integers(1, 1200 * MIB), st.sampled_from([8 * MIB, 512 * MIB, 2**36]))
OPTIONS = st.fixed_dictionaries({"growth": st.booleans(), "garbage_collection": st.booleans()})


def run(allocator: BfcAllocator, steps: list[int]) -> list[tuple[int | None, int, int]]:
    """Address, or None where there was no room, bytes in use and bytes held after every step."""
    live: list[int] = []
    seen = []
    for step in steps:
        address = None
        if step > 0:
            try:
                address = allocator.allocate(step)
                live.append(address)
            except BfcExhausted:
                pass
        elif live:
            allocator.free(live.pop(step % len(live)))
        seen.append((address, allocator.bytes_in_use, allocator.pool_bytes))
    return seen


@settings(max_examples=300, deadline=None)
@given(STEPS, LIMITS, OPTIONS, st.one_of(st.none(), st.integers(0, 700 * MIB)))
def test_it_does_what_the_book_says(
    steps: list[int], limit_bytes: int, options: dict[str, bool], capacity_bytes: int | None
) -> None:
    allocator = BfcAllocator(limit_bytes, sub_allocator=Card(capacity_bytes), **options)
    seen = run(allocator, steps)
    book = BookAllocator(limit_bytes, sub_allocator=Card(capacity_bytes), **options)
    live: list[int] = []
    for number, step in enumerate(steps):
        address = None
        if step > 0:
            address = book.allocate(step)
            if address is not None:
                live.append(address)
        elif live:
            book.free(live.pop(step % len(live)))
        assert seen[number] == (address, book.in_use, book.pool), f"step {number} of {steps}"
    assert allocator.peak_bytes_in_use == book.peak
    chunks = sorted((chunk.ptr, chunk.size, chunk.in_use) for chunk in book.chunks.values())
    assert sorted(allocator.chunks()) == chunks


@settings(max_examples=200, deadline=None)
@given(STEPS, LIMITS, OPTIONS)
def test_chunks_cover_regions_without_overlap(steps: list[int], limit_bytes: int, options: dict[str, bool]) -> None:
    allocator = BfcAllocator(limit_bytes, **options)
    run(allocator, steps)
    chunks = iter(allocator.chunks())
    for region_address, region_bytes in allocator.regions():
        address, before_in_use = region_address, True
        while address < region_address + region_bytes:
            start, size_bytes, in_use = next(chunks)
            assert start == address
            assert size_bytes > 0
            assert in_use or before_in_use, "two free neighbours"
            address, before_in_use = start + size_bytes, in_use
        assert address == region_address + region_bytes
    assert next(chunks, None) is None
    assert allocator.bytes_in_use == sum(size for _, size, in_use in allocator.chunks() if in_use)
    assert allocator.bytes_in_use <= allocator.pool_bytes <= limit_bytes
    assert allocator.bytes_in_use <= allocator.peak_bytes_in_use <= allocator.peak_pool_bytes


@settings(max_examples=100, deadline=None)
@given(STEPS, LIMITS, OPTIONS)
def test_with_everything_freed_a_region_is_one_chunk(
    steps: list[int], limit_bytes: int, options: dict[str, bool]
) -> None:
    allocator = BfcAllocator(limit_bytes, **options)
    run(allocator, steps)
    for address, _, in_use in allocator.chunks():
        if in_use:
            allocator.free(address)
    assert allocator.chunks() == [(address, size_bytes, False) for address, size_bytes in allocator.regions()]
    assert allocator.bytes_in_use == 0


@settings(max_examples=50, deadline=None)
@given(STEPS, LIMITS, OPTIONS)
def test_equal_steps_give_equal_bytes_and_addresses(
    steps: list[int], limit_bytes: int, options: dict[str, bool]
) -> None:
    first, second = (BfcAllocator(limit_bytes, **options) for _ in range(2))
    assert run(first, steps) == run(second, steps)
