"""ResNet-50 (He et al. 2016, arXiv:1512.03385, table 1), the stride in the 3 x 3 convolution as in version 1.5."""

from __future__ import annotations

from torch import Tensor, nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Inner channels and blocks of each stage."""

EXPANSION = 4


class Bottleneck(nn.Module):
    """Three convolutions around which the input goes, projected where its size changes."""

    def __init__(self, incoming: int, inner: int, stride: int) -> None:
        super().__init__()
        outgoing = EXPANSION * inner
        self.body = nn.Sequential(
            nn.Conv2d(incoming, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outgoing, 1, bias=False),
            nn.BatchNorm2d(outgoing),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or incoming != outgoing:
            self.around = nn.Sequential(nn.Conv2d(incoming, outgoing, 1, stride, bias=False), nn.BatchNorm2d(outgoing))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.body(image)
        out += self.around(image)
        activated: Tensor = self.relu(out)
        return activated


class ResNet50(nn.Module):
    """25,557,032 parameters at 1000 classes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        channels = 64
        for stage, (inner, count) in enumerate(STAGES):
            for index in range(count):
                blocks.append(Bottleneck(channels, inner, 2 if stage and not index else 1))
                channels = EXPANSION * inner
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.blocks(self.stem(image))).flatten(1))
        return out
