"""Traces through the BFC allocator."""

from __future__ import annotations

import pytest

from bench.bfc import BfcAllocator, Card, Event, replay

MIB = 2**20


def test_peaks_and_the_event_that_made_them() -> None:
    events = [Event(1, MIB), Event(2, 1000), Event(1, 0), Event(3, 100), Event(2, 0)]
    outcome = replay(events, BfcAllocator(64 * MIB, growth=True))
    assert (outcome.events, outcome.exhausted) == (5, None)
    assert (outcome.peak_bytes_in_use, outcome.peak_at) == (MIB + 1024, 1)
    assert (outcome.end_bytes_in_use, outcome.end_pool_bytes, outcome.peak_pool_bytes) == (256, 2 * MIB, 2 * MIB)


def test_a_name_may_be_used_again() -> None:
    outcome = replay([Event(7, 256), Event(7, 0), Event(7, 512), Event(7, 0)], BfcAllocator(MIB, growth=False))
    assert (outcome.events, outcome.end_bytes_in_use, outcome.peak_bytes_in_use) == (4, 0, 512)


def test_it_stops_where_there_is_no_room() -> None:
    events = [Event(1, MIB), Event(2, MIB), Event(1, 0), Event(3, 5 * MIB), Event(4, 1)]
    outcome = replay(events, BfcAllocator(4 * MIB, growth=False))
    assert outcome.events == 3
    assert outcome.exhausted is not None
    assert outcome.exhausted.requested_bytes == 5 * MIB
    assert (outcome.peak_bytes_in_use, outcome.peak_at, outcome.end_bytes_in_use) == (2 * MIB, 1, MIB)


def test_a_full_card_stops_it_too() -> None:
    outcome = replay([Event(1, MIB)], BfcAllocator(4 * MIB, growth=True, sub_allocator=Card(MIB // 2)))
    assert outcome.events == 0
    assert outcome.exhausted is not None


def test_what_was_there_before_counts() -> None:
    allocator = BfcAllocator(4 * MIB, growth=False)
    allocator.allocate(MIB)
    outcome = replay([Event(1, 256), Event(1, 0)], allocator)
    assert (outcome.peak_bytes_in_use, outcome.peak_at) == (MIB + 256, 0)
    assert replay([Event(1, 256)], allocator).peak_at == -1


def test_no_events() -> None:
    outcome = replay([], BfcAllocator(MIB, growth=True))
    assert (outcome.events, outcome.peak_at, outcome.peak_bytes_in_use, outcome.peak_pool_bytes) == (0, -1, 0, 0)


def test_a_trace_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="event 1: block 0x1 is asked for while it lives"):
        replay([Event(1, 10), Event(1, 10)], BfcAllocator(MIB, growth=True))
    with pytest.raises(ValueError, match="event 0: block 0x1 is given back while it does not live"):
        replay([Event(1, 0)], BfcAllocator(MIB, growth=True))
