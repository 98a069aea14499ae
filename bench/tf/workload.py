"""What a training step in TensorFlow has to offer: the shape of bench.workload.Workload, with TensorFlow's own parts.

    workload = Class(settings)                  # networks, built, on the default device
    optimizers = workload.optimizers()
    for micro_batch in workload.micro_batches(count):
        for network, loss in workload.losses(micro_batch).items():   # inside tf.function
            ...                                 # the gradient of loss() by the network's variables
    ...                                         # clip, apply each optimizer
    workload.finish_step()                      # inside tf.function

A module that defines one imports TensorFlow on use: its settings are read in processes that hold another framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol


class Workload(Protocol):
    """A real training step in TensorFlow.

    Attributes:
        framework: "tensorflow".
        presets: As of bench.workload.Workload.
        baseline: As there.
        unit: As there.
        networks: The trained networks by name, keras layers whose variables exist.
    """

    framework: ClassVar[str]
    presets: ClassVar[Mapping[str, Any]]
    baseline: ClassVar[Mapping[str, Any]]
    unit: ClassVar[str]
    networks: Mapping[str, Any]

    def __init__(self, settings: Any) -> None: ...

    def optimizers(self) -> Mapping[str, Any]:
        """New keras optimizers by network name; called once."""

    def micro_batches(self, count: int) -> Iterator[Any]:
        """Draw the next batch of `settings.batch_size` samples and yield it as `count` equal slices.

        A slice is any nest of tensors and numpy arrays, of the same shapes in every step, or every step is traced anew.
        """

    def losses(self, micro_batch: Any) -> Mapping[str, Callable[[], Any]]:
        """By network name, what computes its scalar loss, a mean over the samples; called in tf.function."""

    def finish_step(self) -> None:
        """What follows the optimizers: target networks, schedules; called in tf.function."""

    @property
    def items_per_step(self) -> int:
        """Items that one step consumes, in `unit`."""


class Recomputable(Protocol):
    """A workload whose activations can be recomputed."""

    def blocks(self) -> Iterable[Any]:
        """Keras layers to recompute in the backward."""
