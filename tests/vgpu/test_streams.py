"""Streams and events: pools of the allocator, reuse, order, overlap and time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bench.vgpu as vgpu

MIB = 2**20


def tensor(mib: int = 4) -> Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="vgpu")


def work(rounds: int = 20) -> None:
    """Keep the current stream busy for some milliseconds."""
    x = torch.empty(2048, 2048, device="vgpu")
    for _ in range(rounds):
        x @ x


class TestCurrent:
    def test_contexts_nest(self, card: vgpu.Device) -> None:
        first, second = torch.vgpu.Stream(), torch.vgpu.Stream()
        assert torch.vgpu.current_stream() == torch.vgpu.default_stream()
        with torch.vgpu.stream(first):
            assert torch.vgpu.current_stream() == first
            with second:
                assert torch.vgpu.current_stream() == second
            assert torch.vgpu.current_stream() == first
            with torch.vgpu.stream(None):
                assert torch.vgpu.current_stream() == first
        assert torch.vgpu.current_stream() == torch.vgpu.default_stream()

    def test_contexts_end_on_errors(self, card: vgpu.Device) -> None:
        with pytest.raises(ZeroDivisionError), torch.vgpu.stream(torch.vgpu.Stream()):
            raise ZeroDivisionError
        assert torch.vgpu.current_stream() == torch.vgpu.default_stream()

    def test_one_stream_may_be_entered_again(self, card: vgpu.Device) -> None:
        stream = torch.vgpu.Stream()
        with stream, stream:
            assert torch.vgpu.current_stream() == stream
        assert torch.vgpu.current_stream() == torch.vgpu.default_stream()

    def test_set_stream(self, card: vgpu.Device) -> None:
        stream = torch.vgpu.Stream()
        torch.vgpu.set_stream(stream)
        assert torch.vgpu.current_stream() == stream
        torch.vgpu.set_stream(torch.vgpu.default_stream())

    def test_the_pool_has_32(self, card: vgpu.Device) -> None:
        streams = [torch.vgpu.Stream() for _ in range(33)]
        assert len({stream.stream_id for stream in streams}) == 32
        assert streams[32] == streams[0]
        assert streams[0].device == torch.device("vgpu", 0)


class TestMemory:
    def test_streams_share_no_cached_blocks(self, card: vgpu.Device) -> None:
        kept = tensor(32)
        del kept
        assert torch.vgpu.memory_reserved() == 32 * MIB
        with torch.vgpu.stream(torch.vgpu.Stream()):
            kept = tensor(32)
            assert torch.vgpu.memory_reserved() == 64 * MIB
            del kept
            kept = tensor(32)
            assert torch.vgpu.memory_reserved() == 64 * MIB
        del kept

    def test_each_stream_has_its_own_workspace(self, card: vgpu.Device) -> None:
        x = torch.rand(8, 8, device="vgpu")
        for count, stream in enumerate((torch.vgpu.default_stream(), torch.vgpu.Stream()), 1):
            with stream:
                x @ x
            assert torch.vgpu.memory_allocated() == 512 + count * 8_519_680

    def test_a_block_in_use_elsewhere_is_not_handed_out_again(self, card: vgpu.Device) -> None:
        side = torch.vgpu.Stream()
        kept = tensor(32)
        with side:
            work()
        kept.record_stream(side)
        del kept
        assert torch.vgpu.memory_allocated() < 32 * MIB + 64 * MIB
        again = tensor(32)
        assert torch.vgpu.memory_stats()["reserved_bytes.all.current"] >= 64 * MIB
        del again
        torch.vgpu.synchronize()
        reserved = torch.vgpu.memory_reserved()
        both = [tensor(32), tensor(32)]
        assert torch.vgpu.memory_reserved() == reserved
        del both

    def test_recording_the_own_stream_changes_nothing(self, card: vgpu.Device) -> None:
        kept = tensor(32)
        work()
        kept.record_stream(torch.vgpu.current_stream())
        del kept
        reserved = torch.vgpu.memory_reserved()
        kept = tensor(32)
        assert torch.vgpu.memory_reserved() == reserved
        del kept

    def test_without_recording_a_block_goes_round_at_once(self, card: vgpu.Device) -> None:
        kept = tensor(32)
        with torch.vgpu.Stream():
            work()
        del kept
        reserved = torch.vgpu.memory_reserved()
        kept = tensor(32)
        assert torch.vgpu.memory_reserved() == reserved
        del kept


class TestOrder:
    def test_the_host_runs_ahead(self, card: vgpu.Device) -> None:
        work()
        stream = torch.vgpu.current_stream()
        assert not stream.query()
        stream.synchronize()
        assert stream.query()

    def test_synchronize_waits_for_all_streams(self, card: vgpu.Device) -> None:
        side = torch.vgpu.Stream()
        with side:
            work()
        torch.vgpu.default_stream().synchronize()
        assert not side.query()
        torch.vgpu.synchronize()
        assert side.query()

    def test_events_happen_in_stream_order(self, card: vgpu.Device) -> None:
        event, later = torch.vgpu.Event(), torch.vgpu.Event()
        assert event.query()  # never recorded
        work()
        event.record()
        work()
        later.record()
        assert not event.query()
        event.synchronize()
        assert event.query()
        assert not later.query()

    def test_waiting_orders_streams_and_not_the_host(self, card: vgpu.Device) -> None:
        main, side = torch.vgpu.default_stream(), torch.vgpu.Stream()
        work()
        done = main.record_event()
        before = card.clock.host_s
        side.wait_event(done)
        assert card.clock.host_s == before
        side.synchronize()
        assert main.query()

    def test_wait_stream(self, card: vgpu.Device) -> None:
        main, side = torch.vgpu.default_stream(), torch.vgpu.Stream()
        with side:
            work()
        main.wait_stream(side)
        main.synchronize()
        assert side.query()


class TestTime:
    def test_elapsed_time_is_that_of_the_stream(self, card: vgpu.Device) -> None:
        start, end = (torch.vgpu.Event(enable_timing=True) for _ in range(2))
        work(1)
        torch.vgpu.synchronize()
        start.record()
        work(10)
        end.record()
        seconds = 10 * 2 * 2048**3 / card.target.matmul_flops_s["fp32"]
        assert start.elapsed_time(end) == pytest.approx(1e3 * seconds, rel=0.02)
        assert end.elapsed_time(start) == -start.elapsed_time(end)

    def test_elapsed_time_needs_timing_and_recording(self, card: vgpu.Device) -> None:
        timed = torch.vgpu.Event(enable_timing=True)
        with pytest.raises(RuntimeError, match="enable_timing=True"):
            timed.elapsed_time(torch.vgpu.Event())
        with pytest.raises(RuntimeError, match="must be recorded"):
            timed.elapsed_time(torch.vgpu.Event(enable_timing=True))

    def test_small_operators_are_bound_by_the_host(self, card: vgpu.Device) -> None:
        x = torch.rand(8, device="vgpu")
        torch.vgpu.synchronize()
        before = dict(card.clock.spent_s)
        for _ in range(100):
            x = x + 1
        torch.vgpu.synchronize()
        spent = {bound: seconds - before.get(bound, 0) for bound, seconds in card.clock.spent_s.items()}
        assert spent["host"] > 0.9 * sum(spent.values())

    def test_time_spent_adds_up_to_the_stream(self, card: vgpu.Device) -> None:
        work(3)
        torch.rand(2**20, device="vgpu").sum().item()
        torch.rand(2**20).to("vgpu")
        torch.vgpu.synchronize()
        assert sum(card.clock.spent_s.values()) == pytest.approx(card.clock.stamp(0).at_s, rel=0.05)


def step(overlap: bool, pinned: bool = True) -> tuple[float, float, float]:
    """Seconds of a copy to the card beside work, and of each alone."""
    with vgpu.virtual_gpu("rtx4090") as card:
        host = torch.empty(64 * MIB, dtype=torch.uint8)
        host = host.pin_memory() if pinned else host
        compute, side = torch.vgpu.current_stream(), torch.vgpu.Stream()
        torch.vgpu.synchronize()
        began = card.clock.host_s
        with torch.vgpu.stream(side if overlap else compute):
            host.to("vgpu", non_blocking=True)
        work()
        torch.vgpu.synchronize()
        total = card.clock.host_s - began
        return total, 64 * MIB / card.target.pcie_bytes_s, 20 * 2 * 2048**3 / card.target.matmul_flops_s["fp32"]


class TestOverlap:
    def test_a_copy_on_a_side_stream_hides_behind_work(self) -> None:
        total, copy, compute = step(overlap=True)
        assert max(copy, compute) < total < 1.05 * max(copy, compute)

    def test_on_one_stream_they_add_up(self) -> None:
        total, copy, compute = step(overlap=False)
        assert total == pytest.approx(copy + compute, rel=0.05)

    def test_pageable_memory_holds_up_the_host(self) -> None:
        total, copy, compute = step(overlap=True, pinned=False)
        assert total == pytest.approx(copy + compute, rel=0.05)

    def test_a_copy_to_the_host_is_pinned_and_not_waited_for_if_asked(self, card: vgpu.Device) -> None:
        for unknown in (True, False):
            source = tensor(64) if unknown else torch.arange(2**20, device="vgpu")
            for non_blocking in (False, True):
                torch.vgpu.synchronize()
                copy = source.to("cpu", non_blocking=non_blocking)
                assert copy.is_pinned() == non_blocking
                assert torch.vgpu.current_stream().query() != non_blocking

    def test_a_copy_into_the_host_waits_unless_the_memory_is_pinned(self, card: vgpu.Device) -> None:
        source = tensor(64)
        for pinned in (False, True):
            host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=pinned)
            torch.vgpu.synchronize()
            host.copy_(source, non_blocking=True)
            assert torch.vgpu.current_stream().query() != pinned
