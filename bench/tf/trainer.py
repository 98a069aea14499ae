"""One training step with its techniques in TensorFlow, written once for every workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import tensorflow as tf

from bench.errors import BadInput
from bench.techniques import Technique
from bench.tf.techniques import Checkpointing, Clip, Precision

ALIGNMENT_BYTES = 64
"""Of arrays that TensorFlow takes over as they are (EIGEN_MAX_ALIGN_BYTES, tensorflow/core/framework/allocator.h)."""

Phase = Callable[[str], AbstractContextManager[Any]]


def _unobserved(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class Trainer:
    """A workload, built with its techniques, ready to step.

    With accumulation, one function adds the gradients of a micro-batch to variables, and another applies the sums;
    without, one function does it all, as og-marl's `_tf_train_step` does.

    Args:
        workload: The class.
        settings: Its settings; techniques that change settings are applied here.
        plan: Every technique, by name.

    Attributes:
        functions: The tf.functions that a step calls.
    """

    def __init__(self, workload: type[Any], settings: Any, plan: Mapping[str, Technique]) -> None:
        for technique in plan.values():
            settings = technique.settings(settings)
        precision = cast(Precision, plan["precision"])
        precision.before_build()
        self.workload = workload(settings)
        cast(Checkpointing, plan["checkpointing"]).after_build(self.workload)
        self.variables: dict[str, list[Any]] = {
            name: network.trainable_variables for name, network in self.workload.networks.items()
        }
        self.optimizers = {name: precision.optimizer(inner) for name, inner in self.workload.optimizers().items()}
        for name, optimizer in self.optimizers.items():
            optimizer.build(self.variables[name])
        self._clip = cast(Clip, plan["clip"])
        self._count: int = plan["accumulation"].value
        self._sums = {
            name: [tf.Variable(tf.zeros_like(v), trainable=False) for v in self.variables[name]]
            for name in (self.variables if self._count > 1 else ())
        }
        compiled = plan["xla"].value
        self._train = tf.function(self._train_on, jit_compile=compiled)
        self._add = tf.function(self._add_gradients, jit_compile=compiled)
        self._apply = tf.function(self._apply_sums, jit_compile=compiled)
        self.functions = [self._train] if self._count == 1 else [self._add, self._apply]

    @property
    def traces(self) -> int:
        """How often TensorFlow traced the step's functions so far."""
        return sum(function.experimental_get_tracing_count() for function in self.functions)

    @property
    def optimizer_variables(self) -> list[Any]:
        """The optimizers' states."""
        return [variable for optimizer in self.optimizers.values() for variable in optimizer.variables]

    def step(self, phase: Phase = _unobserved) -> None:
        """One update; `phase` is entered around each part: batch, then train, or gradients and update."""
        micro_batches = self.workload.micro_batches(self._count)
        for index in range(self._count):
            with phase("batch"):
                micro_batch = next(micro_batches, None)
                if micro_batch is None:
                    raise BadInput(f"the workload yields {index} micro-batches instead of {self._count}")
                batch = tf.nest.map_structure(_on_device, micro_batch)
            with phase("train" if self._count == 1 else "gradients"):
                (self._train if self._count == 1 else self._add)(batch)
            del batch
        if self._count > 1:
            with phase("update"):
                self._apply()

    def gradients(self, batch: Any) -> dict[str, list[Any]]:
        """The gradients of each network's loss on a micro-batch, over their number; in float16 scaled."""
        gradients = {}
        for name, compute in self.workload.losses(batch).items():
            with tf.GradientTape() as tape:
                loss = compute() / self._count
                scaler = self._scaler(name)
                loss = loss if scaler is None else scaler.scale_loss(loss)
            gradients[name] = tape.gradient(loss, self.variables[name])
        return gradients

    def _train_on(self, batch: Any) -> None:
        self._update(self.gradients(batch))

    def _add_gradients(self, batch: Any) -> None:
        for name, gradients in self.gradients(batch).items():
            for total, gradient in zip(self._sums[name], gradients, strict=True):
                total.assign_add(gradient)

    def _apply_sums(self) -> None:
        self._update({name: [total.value() for total in sums] for name, sums in self._sums.items()})
        for total in (total for sums in self._sums.values() for total in sums):
            total.assign(tf.zeros_like(total))

    def _update(self, gradients: Mapping[str, list[Any]]) -> None:
        for name, of_network in gradients.items():
            scaler = self._scaler(name)
            clipped = self._clip.clipped(of_network, 1.0 if scaler is None else scaler.dynamic_scale)
            self.optimizers[name].apply(clipped, self.variables[name])
        self.workload.finish_step()

    def _scaler(self, name: str) -> Any:
        """The optimizer of a network, if it scales the loss."""
        return self.optimizers[name] if hasattr(self.optimizers[name], "dynamic_scale") else None

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by part of each network: "critic.first", ..."""
        return {
            f"{name}.{part}": sum(layer.count_params() for layer in layers)
            for name, network in self.workload.networks.items()
            for part, layers in _parts(network).items()
        }

    def static_tensor_bytes(self) -> dict[str, int]:
        """Bytes of the variables, by category."""
        trained = [variable for variables in self.variables.values() for variable in variables]
        return {"parameters": _size_bytes(trained), "optimizer": _size_bytes(self.optimizer_variables)}


def _on_device(array: Any) -> Any:
    """A tensor of its own; on the processor TensorFlow would use the memory of an array that happens to be aligned."""
    if not isinstance(array, np.ndarray):
        return array
    room = np.empty(array.nbytes + 2 * ALIGNMENT_BYTES, np.uint8)
    offset = -room.ctypes.data % ALIGNMENT_BYTES + array.itemsize  # an item behind an aligned address
    unaligned = room[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    return tf.convert_to_tensor(unaligned)


def _parts(network: Any) -> dict[str, list[Any]]:
    """The layers that a network is made of, by the attribute that holds them."""
    held = {name: value if isinstance(value, list) else [value] for name, value in vars(network).items()}
    layers = {name: [part for part in parts if isinstance(part, tf.keras.layers.Layer)] for name, parts in held.items()}
    return {name: parts for name, parts in layers.items() if parts and not name.startswith("_")}


def _size_bytes(variables: list[Any]) -> int:
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)
