"""The rules of the BFC allocator one by one, with figures worked out from its source."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from bench.bfc import BfcAllocator, BfcExhausted, Card
from bench.bfc.allocator import backed_off, human_bytes

KIB = 2**10
MIB = 2**20
GIB = 2**30


def whole(limit_bytes: int) -> BfcAllocator:
    return BfcAllocator(limit_bytes, growth=False)


def growing(limit_bytes: int = 64 * GIB, **options: object) -> BfcAllocator:
    return BfcAllocator(limit_bytes, growth=True, **options)  # type: ignore[arg-type]


def region_sizes(allocator: BfcAllocator) -> list[int]:
    return [size_bytes for _, size_bytes in allocator.regions()]


def with_holes(*sizes: int) -> tuple[BfcAllocator, list[int]]:
    """An allocator whose free chunks are of these sizes, in this order by address, and one of 1 GiB behind them."""
    allocator = whole(sum(sizes) + 256 * len(sizes) + GIB)
    addresses = []
    for size_bytes in sizes:
        addresses.append(allocator.allocate(size_bytes))
        allocator.allocate(256)  # between two holes
    for address in addresses:
        allocator.free(address)
    return allocator, addresses


@pytest.mark.parametrize(("num_bytes", "chunk_bytes"), [(1, 256), (256, 256), (257, 512), (1000, 1024)])
def test_sizes_are_multiples_of_256(num_bytes: int, chunk_bytes: int) -> None:
    allocator = whole(MIB)
    address = allocator.allocate(num_bytes)
    assert allocator.size_of(address) == chunk_bytes
    assert allocator.bytes_in_use == chunk_bytes


def test_the_smallest_chunk_that_fits_is_taken() -> None:
    allocator, holes = with_holes(4096, 1536, 2048, 1024)
    assert allocator.allocate(1300) == holes[1]


def test_of_equal_chunks_the_lowest_address_is_taken() -> None:
    allocator, holes = with_holes(2048, 1536, 1536)
    assert allocator.allocate(1536) == holes[1]


def test_a_chunk_of_the_same_bin_that_is_too_small_is_passed_over() -> None:
    # 1,024 up to 2,047 bytes are one bin
    allocator, holes = with_holes(1280, 65536)
    assert allocator.allocate(1536) == holes[1]


@pytest.mark.parametrize(
    ("hole_bytes", "num_bytes", "chunk_bytes"),
    [
        (2048, 1024, 1024),  # twice as large
        (1792, 1024, 1792),
        (300 * MIB, 172 * MIB, 172 * MIB),  # 128 MiB larger
        (300 * MIB - 256, 172 * MIB, 300 * MIB - 256),
        (512, 256, 256),
        (1024, 1024, 1024),
    ],
)
def test_a_chunk_is_split_if_twice_as_large_or_128_mib_larger(
    hole_bytes: int, num_bytes: int, chunk_bytes: int
) -> None:
    allocator, holes = with_holes(hole_bytes)
    assert allocator.allocate(num_bytes) == holes[0]
    assert allocator.size_of(holes[0]) == chunk_bytes
    rest = [size for address, size, in_use in allocator.chunks() if address == holes[0] + chunk_bytes and not in_use]
    assert rest == ([hole_bytes - chunk_bytes] if chunk_bytes < hole_bytes else [])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_become_one_chunk(order: tuple[int, int, int]) -> None:
    allocator = whole(1024)
    addresses = [allocator.allocate(256) for _ in range(3)]
    for number in order:
        allocator.free(addresses[number])
    assert allocator.chunks() == [(addresses[0], 1024, False)]


def test_chunks_of_two_regions_stay_apart() -> None:
    class Touching(Card):
        def alloc(self, size_bytes: int) -> int | None:
            self.taken_bytes += size_bytes
            return 2**40 + self.taken_bytes - size_bytes

    allocator = growing(sub_allocator=Touching())
    first, second = allocator.allocate(2 * MIB), allocator.allocate(4 * MIB)
    assert second == first + 2 * MIB
    allocator.free(first)
    allocator.free(second)
    assert allocator.chunks() == [(first, 2 * MIB, False), (second, 4 * MIB, False)]


def test_without_growth_the_whole_limit_is_taken_at_the_first_request() -> None:
    allocator = whole(21 * GIB)
    assert allocator.pool_bytes == 0
    allocator.allocate(1)
    assert region_sizes(allocator) == [21 * GIB]
    assert (allocator.pool_bytes, allocator.peak_pool_bytes, allocator.bytes_in_use) == (21 * GIB, 21 * GIB, 256)


def test_a_limit_that_is_no_multiple_of_256_is_rounded_down() -> None:
    allocator = whole(1000)
    with pytest.raises(BfcExhausted):
        allocator.allocate(769)
    allocator.allocate(768)
    assert allocator.pool_bytes == 768


def test_regions_grow_from_2_mib_by_doubling() -> None:
    allocator = growing()
    for _ in range(12):
        allocator.allocate(MIB)
    # 1 MiB splits a region of 2, and each next region is twice the last: 2 + 4 + 8 hold 12
    assert region_sizes(allocator) == [2 * MIB, 4 * MIB, 8 * MIB]


def test_a_region_doubled_for_a_request_is_not_doubled_again() -> None:
    allocator = growing()
    for _ in range(3):
        allocator.allocate(3 * MIB)  # takes a chunk of 4 MiB whole
    assert region_sizes(allocator) == [4 * MIB, 4 * MIB, 8 * MIB]


def test_the_last_region_is_what_the_limit_leaves() -> None:
    allocator = growing(5 * MIB + 100)
    allocator.allocate(2 * MIB)
    allocator.allocate(2 * MIB)
    assert region_sizes(allocator) == [2 * MIB, 3 * MIB]
    with pytest.raises(BfcExhausted):
        allocator.allocate(256)


def test_a_limit_below_2_mib_is_the_first_region() -> None:
    allocator = growing(MIB)
    allocator.allocate(1)
    assert region_sizes(allocator) == [MIB]


def test_a_region_that_the_card_cannot_give_shrinks_by_steps_of_0_9() -> None:
    # 0.9 in single precision, rounded up to 256; in double precision the first step would give 1,932,735,488
    sizes = [2**31]
    while sizes[-1] > GIB:
        sizes.append(backed_off(sizes[-1]))
    assert sizes[1:] == [1932735232, 1739461632, 1565515520, 1408964096, 1268067840, 1141261056, 1027134976]
    allocator = BfcAllocator(2 * GIB, growth=False, sub_allocator=Card(GIB))
    allocator.allocate(1)
    assert region_sizes(allocator) == [1027134976]


def test_backing_off_ends_below_the_request_though_the_card_has_room() -> None:
    allocator = BfcAllocator(2 * GIB, growth=False, sub_allocator=Card(GIB))
    with pytest.raises(BfcExhausted):
        allocator.allocate(1000 * MIB)  # 1,027,134,976 is the first step that fits the card, and less than this
    assert allocator.pool_bytes == 0
    allocator.allocate(900 * MIB)
    assert region_sizes(allocator) == [1027134976]


def test_backing_off_comes_to_an_end_for_the_smallest_sizes() -> None:
    with pytest.raises(BfcExhausted):
        BfcAllocator(2304, growth=False, sub_allocator=Card(0)).allocate(256)
    allocator = BfcAllocator(2304, growth=False, sub_allocator=Card(2100))
    allocator.allocate(1)
    assert region_sizes(allocator) == [2048]


def after_three_regions(**options: object) -> BfcAllocator:
    """Regions of 2, 4 and 8 MiB, of which the last alone is in use, under a limit of 16 MiB."""
    allocator = growing(16 * MIB, **options)
    addresses = [allocator.allocate(size * MIB) for size in (2, 4, 8)]
    assert region_sizes(allocator) == [2 * MIB, 4 * MIB, 8 * MIB]
    for address in addresses[:2]:
        allocator.free(address)
    return allocator


def test_free_regions_are_given_back_before_giving_up() -> None:
    card = Card()
    allocator = after_three_regions(garbage_collection=True, sub_allocator=card)
    allocator.allocate(6 * MIB)
    assert region_sizes(allocator) == [8 * MIB, 8 * MIB]
    assert (allocator.pool_bytes, allocator.peak_pool_bytes, card.taken_bytes) == (16 * MIB, 16 * MIB, 16 * MIB)
    assert allocator.bytes_in_use == 16 * MIB  # 8 MiB are less than twice 6


def test_free_regions_are_kept_without_garbage_collection() -> None:
    allocator = after_three_regions()
    with pytest.raises(BfcExhausted):
        allocator.allocate(6 * MIB)
    assert allocator.pool_bytes == 14 * MIB


def test_free_regions_are_kept_if_giving_them_back_would_not_help() -> None:
    allocator = after_three_regions(garbage_collection=True)
    with pytest.raises(BfcExhausted):
        allocator.allocate(8 * MIB + 1)
    assert allocator.pool_bytes == 14 * MIB


def test_a_region_in_use_at_its_end_is_no_free_region() -> None:
    allocator = growing(8 * MIB, garbage_collection=True)
    first, last = allocator.allocate(MIB), allocator.allocate(MIB)
    allocator.free(first)
    with pytest.raises(BfcExhausted):
        allocator.allocate(7 * MIB)
    assert allocator.size_of(last) == MIB


def test_counters() -> None:
    allocator = growing()
    first = allocator.allocate(1000)
    allocator.free(allocator.allocate(100_000))
    assert (allocator.bytes_in_use, allocator.peak_bytes_in_use) == (1024, 1024 + 100_096)
    assert (allocator.num_allocs, allocator.largest_alloc_bytes) == (2, 100_096)
    allocator.clear_stats()
    assert (allocator.peak_bytes_in_use, allocator.num_allocs, allocator.largest_alloc_bytes) == (1024, 0, 0)
    assert allocator.peak_pool_bytes == 2 * MIB
    allocator.free(first)
    assert (allocator.bytes_in_use, allocator.peak_bytes_in_use) == (0, 1024)


def test_the_error_says_what_was_there() -> None:
    allocator = BfcAllocator(4 * MIB, growth=False, name="GPU_0_bfc")
    allocator.allocate(MIB)
    with pytest.raises(BfcExhausted) as caught:
        allocator.allocate(3 * MIB + 1)
    error = caught.value
    assert (error.requested_bytes, error.rounded_bytes) == (3 * MIB + 1, 3 * MIB + 256)
    assert (error.limit_bytes, error.pool_bytes, error.bytes_in_use) == (4 * MIB, 4 * MIB, MIB)
    assert error.largest_free_bytes == 3 * MIB
    words = (
        "OOM when allocating: Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.00MiB (rounded to 3145984)"
    )
    assert str(error).startswith(words)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_failed_request_changes_nothing_in_use() -> None:
    allocator = whole(4 * MIB)
    allocator.allocate(MIB)
    chunks = allocator.chunks()
    with pytest.raises(BfcExhausted):
        allocator.allocate(4 * MIB)
    assert allocator.chunks() == chunks
    assert (allocator.num_allocs, allocator.peak_bytes_in_use) == (1, MIB)


def test_nonsense_is_refused() -> None:
    allocator = whole(MIB)
    with pytest.raises(ValueError, match="chunk of 0 bytes"):
        allocator.allocate(0)
    address = allocator.allocate(1)
    allocator.free(address)
    for call in (allocator.free, allocator.size_of):
        with pytest.raises(ValueError, match="no chunk is handed out"):
            call(address)
    with pytest.raises(ValueError, match="holds nothing"):
        whole(0)
    with pytest.raises(ValueError, match="-1 bytes"):
        Card(-1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1023, "1023B"),
        (1536, "1.5KiB"),
        (MIB, "1.00MiB"),
        (944 * MIB, "944.00MiB"),
        (18 * GIB + GIB // 4, "18.25GiB"),
    ],
)
def test_sizes_in_words(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_importing_it_loads_no_framework() -> None:
    code = "import sys, bench.bfc; print([name for name in ('torch', 'tensorflow') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
