"""Tables much larger than the network on top, looked up one by one and in bags that offsets part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from live_bytes import Family, Term, adamw, agree
from torch import Tensor, nn

import bench.vgpu as vgpu

ROWS, WIDTH, HIDDEN, CLASSES = 50_000, 16, 32, 5


class Words(nn.Module):
    """Four words in a row, and a class for them."""

    def __init__(self, **options: bool | int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, **options)  # type: ignore[arg-type]
        self.head = nn.Sequential(nn.Linear(4 * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, words: Tensor) -> Tensor:
        classes: Tensor = self.head(self.table(words).flatten(1))
        return classes


class Bags(nn.Module):
    """Bags of items in one list, and a class for each."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode=mode)
        self.head = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        classes: Tensor = self.head(self.table(items, offsets))
        return classes


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("batch", [16, 900])
def test_lookups(batch: int, options: dict[str, bool | int]) -> None:
    """The larger batch has more than the 3072 indices from which on the card sorts them."""
    card = agree(
        Family(
            model=lambda: Words(**options),
            batch=lambda device: (
                torch.zeros(batch, 4, dtype=torch.long, device=device),
                torch.zeros(batch, dtype=torch.long, device=device),
            ),
            loss=lambda model, words, classes: F.cross_entropy(model(words), classes),
            optimizer=adamw,
        )
    )
    assert not card.unpriced


@pytest.mark.parametrize(("bags", "each"), [(8, 4), (20, 3)])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_by_offsets(mode: str, bags: int, each: int) -> None:
    """What bags keep, see test_embeddings.py; here the backward is largest where the table's gradient is made of it."""
    agree(
        Family(
            model=lambda: Bags(mode),
            batch=lambda device: (
                torch.zeros(bags * each, dtype=torch.long, device=device),
                torch.arange(0, bags * each, each, device=device),
                torch.zeros(bags, dtype=torch.long, device=device),
            ),
            loss=lambda model, items, offsets, classes: F.cross_entropy(model(items, offsets), classes),
            optimizer=adamw,
        ),
        Term("a bag for each index", 8 * (bags * each if mode == "sum" else -1)),
        Term("sizes in place of maxima", -8 * bags),
    )


def test_sparse_gradients_of_bags_are_refused() -> None:
    """As those of tables are: SparseAdam has nothing to step with."""
    with vgpu.virtual_gpu("rtx4090"):
        bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True).to("vgpu")
        summed = bags(torch.zeros(4, 2, dtype=torch.long, device="vgpu")).sum()
        with pytest.raises(NotImplementedError, match="Sparse"):
            summed.backward()
