"""ResNet-50 in training: batch, image size, layout and precision varied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from live_bytes import Family, Term, agree, sgd
from resnet import EXPANSION, STAGES, ResNet50
from torch import nn

NORMS = 53


def resnet(layout: torch.memory_format) -> nn.Module:
    """The network with its filters in `layout`."""
    model = ResNet50(classes=10)
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=layout)
    return model


def classification(batch: int, size: int, layout: torch.memory_format, **options: bool | int) -> Family:
    return Family(
        model=partial(resnet, layout),
        batch=lambda device: (
            torch.rand(batch, 3, size, size, device=device).contiguous(memory_format=layout),
            torch.zeros(batch, dtype=torch.long, device=device),
        ),
        loss=lambda model, images, classes: F.cross_entropy(model(images), classes),
        optimizer=sgd,
        fake=True,
        **options,  # type: ignore[arg-type]
    )


def test_it_is_resnet_50() -> None:
    with torch.device("meta"):
        model = ResNet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == NORMS
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize(
    ("batch", "size", "layout"),
    [
        (2, 224, torch.contiguous_format),
        (4, 64, torch.channels_last),
    ],
    ids=str,
)
def test_float32(batch: int, size: int, layout: torch.memory_format) -> None:
    card = agree(classification(batch, size, layout))
    steps, convolutions = 2, 53
    assert set(card.unpriced.values()) == {steps * convolutions}  # forward and backward, each of them counted


def norm_channels(of: Callable[[int, int], bool]) -> int:
    """Channels of the batch norms of the stem, and of those stages and blocks."""
    total = STAGES[0][0]
    for stage, (inner, count) in enumerate(STAGES):
        for block in range(count):
            if of(stage, block):
                total += 2 * inner + EXPANSION * inner + (0 if block else EXPANSION * inner)
    return total


def test_bfloat16() -> None:
    """Two statistics for each channel in float32, which the CPU keeps in bfloat16.

    aten/src/ATen/native/cudnn/BatchNorm.cpp: those of half precision are float32. The backward peaks in the third
    stage's first block, whose first norm is still to come.
    """
    lost = 2 * (4 - 2)
    agree(
        classification(4, 64, torch.contiguous_format, autocast=True),
        Term(
            "statistics are float32",
            lost * norm_channels(lambda stage, block: True),
            frozenset({"forward, peak", "forward, after"}),
        ),
        Term(
            "statistics are float32",
            lost * (norm_channels(lambda stage, block: stage < 2) + STAGES[2][0]),
            frozenset({"backward, peak"}),
        ),
    )
