"""Running out of memory: CUDA's words, who asked, and going on afterwards."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bench.vgpu as vgpu

GIB = 2**30


def fill(gib: float) -> Tensor:
    return torch.empty(int(gib * GIB), dtype=torch.uint8, device="vgpu")


def refused(call: Any) -> Any:
    """The error that a call ends with, without the frames that keep what it held."""
    try:
        call()
    except torch.OutOfMemoryError as error:
        return error.with_traceback(None)
    return pytest.fail("did not run out of memory")


def test_message_is_cudas_with_who_asked(card: vgpu.Device) -> None:
    kept = fill(20)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    error = refused(lambda: torch.empty(4, 2**28, device="vgpu"))
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 23.52 GiB of which 3.06 GiB is "
        "free. Including non-PyTorch memory, this process has 20.46 GiB memory in use. Of the allocated memory "
        "20.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. "
        f"Asked for by aten.empty.memory_format at test_oom.py:{line} in <lambda>."
    )
    assert error.requested_bytes == 4 * GIB
    assert error.operator == "aten.empty.memory_format"
    assert error.line == f"test_oom.py:{line} in <lambda>"
    del kept


def test_error_is_torchs(card: vgpu.Device) -> None:
    error = refused(lambda: fill(30))
    assert isinstance(error, torch.cuda.OutOfMemoryError)
    assert isinstance(error, torch.vgpu.OutOfMemoryError)
    assert isinstance(error, RuntimeError)


def test_a_memory_fraction_is_named(card: vgpu.Device) -> None:
    torch.vgpu.set_per_process_memory_fraction(0.5)
    assert "memory in use. 11.76 GiB allowed; Of the allocated memory" in str(refused(lambda: fill(12)))


def test_the_cache_is_emptied_first(card: vgpu.Device) -> None:
    cached = [fill(5) for _ in range(4)]
    del cached
    assert torch.vgpu.memory_reserved() == 20 * GIB
    kept = fill(15)
    assert torch.vgpu.memory_reserved() == 15 * GIB
    stats = torch.vgpu.memory_stats()
    assert stats["num_alloc_retries"] == 1
    assert stats["num_ooms"] == 0
    refused(lambda: fill(15))
    assert torch.vgpu.memory_stats()["num_ooms"] == 1
    del kept


def test_a_failed_request_changes_nothing(card: vgpu.Device) -> None:
    kept = fill(20)
    refused(lambda: torch.ones(10, GIB, device="vgpu"))
    assert torch.vgpu.memory_allocated() == 20 * GIB
    assert kept.shape == (20 * GIB,)
    del kept
    assert torch.vgpu.memory_allocated() == 0
    assert fill(20).shape == (20 * GIB,)


class TestBackward:
    """Errors leave a backward as they leave any other call."""

    def test_out_of_memory(self, card: vgpu.Device) -> None:
        weight = torch.empty(2**13, 2**13, device="vgpu", requires_grad=True)
        loss = (weight @ weight).sum()
        rest = fill(22.5)
        error = refused(loss.backward)
        assert error.operator == "aten.mm.default"
        del rest
        assert weight.grad is None
        (weight @ weight).sum().backward()
        assert weight.grad is not None

    def test_out_of_memory_names_the_line_of_the_backward(self, card: vgpu.Device) -> None:
        weight = torch.empty(2**13, 2**13, device="vgpu", requires_grad=True)
        loss = (weight @ weight).sum()
        rest = fill(22.5)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            loss.backward()
        assert " in test_out_of_memory_names_the_line_of_the_backward" in caught.value.line  # type: ignore[attr-defined]
        del rest

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_out_of_memory_in_a_recomputation(self, card: vgpu.Device, use_reentrant: bool) -> None:
        model = nn.Sequential(nn.Linear(64, 2**14), nn.GELU(), nn.Linear(2**14, 1)).to("vgpu")
        x = torch.rand(2**15, 64, device="vgpu", requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=use_reentrant).sum()
        rest = fill(20)
        error = refused(loss.backward)
        assert error.operator == "aten.gelu.default"
        del rest

    def test_errors_of_hooks(self, card: vgpu.Device) -> None:
        x = torch.rand(3, device="vgpu", requires_grad=True)

        def fail(gradient: Tensor) -> None:
            raise ValueError("from a hook")

        x.register_hook(fail)
        with pytest.raises(ValueError, match="from a hook"):
            x.sum().backward()

    def test_errors_of_custom_functions(self, card: vgpu.Device) -> None:
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                raise KeyError("from a function")

        x = torch.rand(3, device="vgpu", requires_grad=True)
        for _ in range(2):
            with pytest.raises(KeyError, match="from a function"):
                Fails.apply(x).sum().backward()
        with pytest.raises(KeyError, match="from a function"):
            torch.autograd.grad(Fails.apply(x).sum(), x)
        (x * 2).sum().backward()
        assert x.grad is not None

    def test_errors_of_torch(self, card: vgpu.Device) -> None:
        x = torch.rand(3, device="vgpu", requires_grad=True)
        loss = x.exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_a_smaller_batch_after_the_error(card: vgpu.Device) -> None:
    model = nn.Sequential(nn.Linear(1024, 2**14), nn.ReLU(), nn.Linear(2**14, 1024)).to("vgpu")
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch_size: int) -> None:
        optimizer.zero_grad()
        model(torch.rand(batch_size, 1024, device="vgpu")).square().mean().backward()
        optimizer.step()

    batch_size, tried = 2**20, []
    while True:
        tried.append(batch_size)
        try:
            step(batch_size)
            break
        except torch.OutOfMemoryError:
            pass
        torch.vgpu.empty_cache()
        batch_size //= 2
    assert tried == [2**20, 2**19, 2**18, 2**17, 2**16]
    held = torch.vgpu.memory_allocated()
    for _ in range(3):
        step(batch_size)
        assert torch.vgpu.memory_allocated() == held


def test_failing_halfway_frees_what_was_made(card: vgpu.Device) -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(40))).to("vgpu")
    before = torch.vgpu.memory_allocated()
    refused(lambda: model(torch.rand(2**16, 4096, device="vgpu")))
    assert torch.vgpu.memory_allocated() == before + 8_519_680


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (944 * 2**20, "944.00 MiB"), (5 * GIB // 2, "2.50 GiB")],
)
def test_sizes_are_written_as_torch_writes_them(size_bytes: int, text: str) -> None:
    from bench.vgpu.oom import format_size

    assert format_size(size_bytes) == text


def test_a_storage_that_cannot_grow_is_out_of_memory_too() -> None:
    with vgpu.virtual_gpu("k80"):
        tensor = torch.empty(1024, device="vgpu")
        before = torch.vgpu.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20.00 GiB.*UntypedStorage.resize_"):
            tensor.untyped_storage().resize_(20 * 2**30)
        assert torch.vgpu.memory_allocated() <= before
        del tensor
        torch.empty(1024, device="vgpu")
        assert torch.vgpu.memory_allocated() in (0, before)
