"""Recommenders: most of their bytes are tables, and most of a step's peak is the optimizer's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from live_bytes import Family, Term, adamw, agree
from torch import Tensor, nn

import bench.vgpu as vgpu

USERS, ITEMS, WIDTH = 5000, 20_000, 16
FORWARD = frozenset({"forward, peak", "forward, after"})


class Recommender(nn.Module):
    """A table of users, bags of items, and a network on both."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.items = nn.EmbeddingBag(ITEMS, WIDTH, mode=mode)
        self.top = nn.Sequential(nn.Linear(2 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        score: Tensor = self.top(torch.cat([self.users(users), self.items(items)], 1))
        return score.squeeze(1).sigmoid()


def clicks(mode: str, batch: int, items: int, accumulation: int = 1) -> Family:
    return Family(
        model=lambda: Recommender(mode),
        batch=lambda device: (
            torch.zeros(batch, dtype=torch.long, device=device),
            torch.zeros(batch, items, dtype=torch.long, device=device),
            torch.zeros(batch, device=device),
        ),
        loss=lambda model, users, items, clicked: F.binary_cross_entropy(model(users, items), clicked),
        optimizer=adamw,
        accumulation=accumulation,
    )


@pytest.mark.parametrize(("batch", "items"), [(64, 20), (16, 100)])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str, batch: int, items: int) -> None:
    """The bag of each index is kept; the CPU's sum does without, and its other modes keep one number more.

    aten/src/ATen/native/cuda/EmbeddingBag.cu and native/EmbeddingBag.cpp, which also keeps sizes in the place of the
    indices of maxima. The loss lies in the storage of the losses by element on both.
    """
    bags = {"sum": batch * items, "mean": -1, "max": -1}[mode]
    card = agree(
        clicks(mode, batch, items),
        Term("a bag for each index", 8 * bags, FORWARD),
        Term("sizes in place of maxima", -8 * batch * (mode != "max"), FORWARD),
    )
    assert not card.unpriced
    assert not card.stand_ins


def test_accumulated_gradients_of_tables() -> None:
    """The second micro-batch's backward starts beside the first's gradients, and is largest with its graph there."""
    agree(
        clicks("mean", 32, 8, accumulation=2),
        Term("a bag for each index", -8),
        Term("sizes in place of maxima", -8 * 32),
    )


def test_sparse_gradients_are_refused() -> None:
    """They are no storage of which a virtual card could tell the bytes."""
    with vgpu.virtual_gpu("rtx4090"):
        table = nn.Embedding(ITEMS, WIDTH, sparse=True).to("vgpu")
        with pytest.raises(NotImplementedError, match="Sparse"):
            table(torch.zeros(4, dtype=torch.long, device="vgpu")).sum().backward()
