"""Workloads for the tests: tiny, and each with one trait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Settings:
    batch_size: int = 4


class Steady:
    """A linear layer, in a process that holds TensorFlow and no torch."""

    framework: ClassVar[str] = "tensorflow"
    presets: ClassVar[Mapping[str, Any]] = {"only": Settings()}
    baseline: ClassVar[Mapping[str, Any]] = {"allocation": "growth"}
    unit: ClassVar[str] = "rows"

    def __init__(self, settings: Settings) -> None:
        import keras

        assert "torch" not in sys.modules
        self.settings = settings
        self.steps = 0
        self.layer = keras.layers.Dense(3)
        self.layer.build((None, 5))
        self.networks: Mapping[str, Any] = {"layer": self.layer}

    def optimizers(self) -> Mapping[str, Any]:
        import keras

        return {"layer": keras.optimizers.SGD(0.1)}

    def rows(self) -> int:
        return self.settings.batch_size

    def micro_batches(self, count: int) -> Iterator[Any]:
        import numpy as np

        self.steps += 1
        for _ in range(count):
            yield np.ones((self.rows() // count, 5), np.float32)

    def losses(self, micro_batch: Any) -> Mapping[str, Callable[[], Any]]:
        import tensorflow as tf

        return {"layer": lambda: tf.reduce_mean(self.layer(micro_batch) ** 2)}

    def finish_step(self) -> None:
        pass

    @property
    def items_per_step(self) -> int:
        return self.settings.batch_size


class Growing(Steady):
    """One more row in every step: a shape that TensorFlow has not traced yet."""

    def rows(self) -> int:
        return self.settings.batch_size + self.steps


class Short(Steady):
    """Fewer micro-batches than it is asked for."""

    def micro_batches(self, count: int) -> Iterator[Any]:
        yield from list(super().micro_batches(count))[: count - 1]
