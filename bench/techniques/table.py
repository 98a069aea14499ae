"""PyTorch's techniques."""

from __future__ import annotations

from bench.techniques.base import Technique
from bench.techniques.batch import Accumulation, BatchSize
from bench.techniques.checkpointing import Checkpointing
from bench.techniques.clearing import SetToNone
from bench.techniques.clipping import Clip
from bench.techniques.offload import Offload
from bench.techniques.precision import Precision
from bench.techniques.sharding import Reshard, Sharding
from bench.techniques.sharing import Sharing

TECHNIQUES: dict[str, type[Technique]] = {
    technique.name: technique
    for technique in (
        BatchSize,
        Sharing,
        Accumulation,
        Precision,
        Checkpointing,
        Offload,
        Sharding,
        Reshard,
        SetToNone,
        Clip,
    )
}
"""Every technique by name, in the order in which they act: blocks are wrapped before units are sharded."""
