"""What a training step has to offer, and how it is found.

A workload is any class with the shape of `Workload`. It imports nothing of the harness, knows no target and no
technique; it offers hooks (`blocks`, `shards`, fields of its settings) and techniques use them. The harness calls:

    settings = Class.presets["tiny"]            # a frozen dataclass, possibly with fields replaced
    workload = Class(settings)                  # networks on the CPU or on meta
    ...                                         # techniques wrap blocks, shard units
    workload.place(device)                      # parameters and buffers on the device
    optimizers = workload.optimizers()
    for micro_batch in workload.micro_batches(count):
        for loss in workload.losses(micro_batch):
            (loss / count).backward()
    ...                                         # clip, step each optimizer
    workload.finish_step()
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

from bench.errors import BadInput
from bench.frameworks import framework_of, load

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@runtime_checkable
class Workload(Protocol):
    """A real training step.

    Attributes:
        presets: Settings by name, each a frozen dataclass with at least an integer `batch_size`; the first is the
            default. Fields named like a technique (`batch_size`, `sharing`) are what that technique changes.
        baseline: Technique values that make up the plain configuration, where they differ from "off".
        unit: What `items_per_step` counts: "transitions", "tokens", ...
        networks: The trained networks by name, as built by `__init__`.
    """

    presets: ClassVar[Mapping[str, Any]]
    baseline: ClassVar[Mapping[str, Any]]
    unit: ClassVar[str]
    networks: Mapping[str, nn.Module]

    def __init__(self, settings: Any) -> None: ...

    def place(self, device: torch.device) -> None:
        """Move or materialise every parameter, buffer and target network on `device`."""

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """New optimizers by network name; called once, after `place`."""

    def micro_batches(self, count: int) -> Iterator[Any]:
        """Draw the next batch of `settings.batch_size` samples and yield it as `count` equal slices on the device."""

    def losses(self, micro_batch: Any) -> Iterable[Tensor]:
        """Yield scalar losses, each a mean over the samples.

        Each is backwarded before the next is asked for, so a generator frees one graph before it builds the next.
        """

    def finish_step(self) -> None:
        """What follows the optimizers: target networks, schedules."""

    @property
    def items_per_step(self) -> int:
        """Items that one step consumes, in `unit`."""


class Checkpointable(Protocol):
    """A workload whose activations can be recomputed."""

    def blocks(self) -> Iterable[nn.Module]:
        """Modules to recompute in the backward; called before `place`."""


class Traceable(Protocol):
    """A workload whose step can be followed from inside."""

    def phases(self) -> Mapping[str, nn.Module]:
        """Modules by phase name; memory is recorded at every call of one (a decoding step, a layer)."""


class Shardable(Protocol):
    """A workload whose parameters can be sharded by FSDP2."""

    def shards(self) -> Iterable[nn.Module]:
        """Units for `fully_shard`, inner ones first, the root last; called before `place`."""


def load_workload(path: str) -> type[Workload]:
    """Import the workload class at `path`, as in "package.module:Class".

    Raises:
        BadInput: The path has no colon, nothing is there, or what is there lacks part of the framework's protocol.
    """
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise BadInput(f"workload path {path!r} is not of the form package.module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"no workload at {path!r}: {error}") from error
    protocol = load(framework_of(found).protocol)
    named = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
    missing = sorted(name for name in named - {"networks"} if not hasattr(found, name))
    if missing:
        raise BadInput(f"{path} is not a workload: it lacks {', '.join(missing)}")
    return cast(type[Workload], found)
