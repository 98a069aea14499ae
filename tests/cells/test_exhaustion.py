"""Memory that runs out elsewhere than in the caching allocator is an OOM too, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from bench.cell import run_cell
from bench.config import Cell
from bench.record import Status
from bench.techniques.table import TECHNIQUES

HINTS = "\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda.\nCompile with `TORCH_USE_CUDA_DSA`."
OUT_OF_MEMORY: dict[str, Exception] = {
    "accelerator": torch.AcceleratorError(f"CUDA error: out of memory{HINTS}"),
    "before 2.8": RuntimeError(f"CUDA error: out of memory{HINTS}"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
}
OTHERS: dict[str, Exception] = {
    "accelerator": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "host": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    "no error of torch's": ValueError("CUDA error: out of memory"),
}


@dataclass(frozen=True)
class Settings:
    batch_size: int = 1
    error: str = ""


class Failing:
    """Raises the error that its settings name in the first loss."""

    presets: ClassVar[Mapping[str, Settings]] = {"only": Settings()}
    baseline: ClassVar[Mapping[str, Any]] = {}
    unit = "samples"
    items_per_step = 1

    def __init__(self, settings: Settings) -> None:
        self.error = {**OUT_OF_MEMORY, **{f"other {name}": error for name, error in OTHERS.items()}}[settings.error]
        self.networks = {"net": nn.Linear(4, 4)}

    def place(self, device: torch.device) -> None:
        self.networks["net"].to(device)

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"net": torch.optim.Adam(self.networks["net"].parameters())}

    def micro_batches(self, count: int) -> Iterable[None]:
        return [None] * count

    def losses(self, micro_batch: None) -> Iterable[Tensor]:
        raise self.error

    def finish_step(self) -> None: ...


def failing(error: str) -> Cell:
    return Cell(
        workload=f"{__name__}:Failing",
        preset="only",
        settings={"batch_size": 1, "error": error},
        techniques={name: technique.off for name, technique in TECHNIQUES.items()},
        target="rtx4090",
    )


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_memory_that_a_library_lacks_is_an_oom_with_its_reason(error: str) -> None:
    record = run_cell(failing(error))
    assert record.status is Status.OOM
    said = str(OUT_OF_MEMORY[error]).partition("\n")[0]
    assert record.reason is not None
    assert record.reason.startswith(f"{said}. Asked for at test_exhaustion.py:")
    assert record.reason.endswith(" in losses.")
    assert record.first is not None
    assert record.first.categories["parameters"] == 2 * 512


@pytest.mark.parametrize("error", OTHERS)
def test_another_error_is_none(error: str) -> None:
    with pytest.raises(type(OTHERS[error])) as raised:
        run_cell(failing(f"other {error}"))
    assert raised.value is OTHERS[error]
