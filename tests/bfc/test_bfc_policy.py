"""Limits of TensorFlow's allocator on real cards, with figures worked out from gpu_device.cc."""

from __future__ import annotations

import pytest

from bench.bfc import GRAB, GROWTH, BfcExhausted, MemoryPolicy, allocator_on_card, jax_pool_bytes
from bench.bfc.policy import limit_bytes, reserve_bytes

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(
    ("available_bytes", "major", "reserve_mib"),
    [
        (2 * GIB - 1, 9, 225),
        (2 * GIB, 3, 500),
        (11 * GIB, 6, 500),
        (16 * GIB, 7, 1050),
        (24 * GIB, 8, 1536),
        (80 * GIB, 9, 1800),
        (180 * GIB, 10, 1800),
        (32 * GIB, 12, 1800),
    ],
)
def test_the_reserve_goes_by_compute_capability(available_bytes: int, major: int, reserve_mib: int) -> None:
    assert reserve_bytes(available_bytes, major) == reserve_mib * MIB
    assert limit_bytes(available_bytes, major, GRAB) == available_bytes - reserve_mib * MIB
    assert limit_bytes(available_bytes, major, GROWTH) == available_bytes - reserve_mib * MIB


def test_less_than_the_reserve_is_taken_whole() -> None:
    assert limit_bytes(225 * MIB, 8, GRAB) == 225 * MIB
    assert limit_bytes(226 * MIB, 8, GRAB) == MIB


def test_grabbing_takes_a_4090_at_once() -> None:
    allocator = allocator_on_card(24217 * MIB, (8, 9), outside_bytes=470 * MIB)
    assert allocator.limit_bytes == (24217 - 470 - 1536) * MIB
    allocator.allocate(4)
    assert allocator.pool_bytes == allocator.limit_bytes


def test_growth_takes_2_mib_first() -> None:
    allocator = allocator_on_card(24217 * MIB, (8, 9), GROWTH, outside_bytes=470 * MIB)
    assert allocator.limit_bytes == (24217 - 470 - 1536) * MIB
    allocator.allocate(4)
    assert allocator.pool_bytes == 2 * MIB


def test_a_limit_is_taken_at_once() -> None:
    allocator = allocator_on_card(24217 * MIB, (8, 9), MemoryPolicy(limit_bytes=4096 * MIB))
    allocator.allocate(4)
    assert (allocator.limit_bytes, allocator.pool_bytes) == (4096 * MIB, 4096 * MIB)


def test_a_limit_above_what_is_free_is_backed_off() -> None:
    allocator = allocator_on_card(GIB, (8, 9), MemoryPolicy(limit_bytes=2 * GIB))
    allocator.allocate(4)
    assert (allocator.limit_bytes, allocator.pool_bytes) == (2 * GIB, 1027134976)


def test_free_regions_are_collected_as_on_a_gpu() -> None:
    allocator = allocator_on_card(4 * GIB, (8, 9), GROWTH)  # a limit of 2,560 MiB
    small = [allocator.allocate(512 * MIB), allocator.allocate(1024 * MIB)]
    for address in small:
        allocator.free(address)
    allocator.allocate(2048 * MIB)
    assert allocator.pool_bytes == 2048 * MIB


def test_jax_takes_18_gib_of_a_24_gib_card_first() -> None:
    jax_bytes = jax_pool_bytes(24 * GIB, 24 * GIB - 300 * MIB)
    assert jax_bytes == 18 * GIB
    allocator = allocator_on_card(24 * GIB, (8, 9), others_bytes=jax_bytes + 300 * MIB, outside_bytes=470 * MIB)
    assert allocator.limit_bytes == (6 * 1024 - 300 - 470 - 1536) * MIB
    with pytest.raises(BfcExhausted):
        allocator.allocate(4 * GIB)


def test_jax_backs_off_where_another_process_was_first() -> None:
    # 18 GiB = 19,327,352,832 are not free; 0.9 of it, in single precision: 17,394,616,320
    assert jax_pool_bytes(24 * GIB, 17 * GIB) == 17394616320
    with pytest.raises(BfcExhausted):
        jax_pool_bytes(24 * GIB, 0)


def test_another_fraction() -> None:
    assert jax_pool_bytes(24 * GIB, 24 * GIB, 0.25) == 6 * GIB
    assert jax_pool_bytes(1001, 1001, 1.0) == 768


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        MemoryPolicy(growth=True, limit_bytes=GIB)
    for size_bytes in (0, -MIB, MIB + 1, 1000):
        with pytest.raises(ValueError, match="whole MiB"):
            MemoryPolicy(limit_bytes=size_bytes)
    for wrong in ({"outside_bytes": -1}, {"others_bytes": -1}):
        with pytest.raises(ValueError, match="less than 0"):
            allocator_on_card(GIB, (8, 9), **wrong)
    with pytest.raises(ValueError, match="nothing is left"):
        allocator_on_card(GIB, (8, 9), others_bytes=GIB)
    for capability in ((0, 5), (8, -1)):
        with pytest.raises(ValueError, match="compute capability"):
            allocator_on_card(GIB, capability)
    for fraction in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match="fraction"):
            jax_pool_bytes(GIB, GIB, fraction)
    with pytest.raises(ValueError, match="cannot be free"):
        jax_pool_bytes(GIB, GIB + 1)
