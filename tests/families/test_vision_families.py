"""ResNet-50 with filters and images in the same layout: batches and image sizes varied."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from live_bytes import Family, agree, sgd
from resnet import ResNet50
from torch import nn


def classification(batch: int, size: int, layout: torch.memory_format) -> Family:
    def network() -> nn.Module:
        model = ResNet50(classes=10)
        for parameter in model.parameters():
            if parameter.dim() == 4:  # what Module.to does to a layout, which fails on fake tensors under MemTracker
                parameter.data = parameter.data.to(memory_format=layout)
        return model

    return Family(
        model=network,
        batch=lambda device: (
            torch.rand(batch, 3, size, size, device=device).to(memory_format=layout),
            torch.zeros(batch, dtype=torch.long, device=device),
        ),
        loss=lambda model, images, classes: F.cross_entropy(model(images), classes),
        optimizer=sgd,
        fake=True,
    )


@pytest.mark.parametrize(
    ("batch", "size", "layout"),
    [(2, 64, torch.contiguous_format), (2, 64, torch.channels_last), (4, 96, torch.channels_last)],
    ids=str,
)
def test_layouts(batch: int, size: int, layout: torch.memory_format) -> None:
    """Without a term: batch norms keep a mean and an inverse deviation per channel on both."""
    agree(classification(batch, size, layout))
