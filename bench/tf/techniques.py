"""TensorFlow's techniques, each through TensorFlow's own API; they import it on use, as others read this table too.

Names and values are those of PyTorch's techniques where both have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from bench.errors import BadInput, unknown
from bench.techniques import clipping
from bench.techniques.base import Fidelity, Technique
from bench.techniques.batch import Accumulation, BatchSize
from bench.techniques.choice import Choice, Toggle
from bench.techniques.sharing import Sharing


class Precision(Choice):
    """`fp32`, or Keras' mixed_float16 (with LossScaleOptimizer) or mixed_bfloat16; weights stay in float32."""

    name: ClassVar[str] = "precision"
    off: ClassVar[Any] = "fp32"
    words = ("fp32", "fp16", "bf16")
    fidelity = Fidelity.ROUNDING

    def before_build(self) -> None:
        """Set the policy that layers follow from now on."""
        import keras

        keras.mixed_precision.set_dtype_policy(
            {"fp32": "float32", "fp16": "mixed_float16", "bf16": "mixed_bfloat16"}[self.value]
        )

    def optimizer(self, inner: Any) -> Any:
        """The optimizer, scaling the loss in float16."""
        import keras

        return keras.mixed_precision.LossScaleOptimizer(inner) if self.value == "fp16" else inner


class Checkpointing(Choice):
    """`on` recomputes the workload's blocks in the backward, by `tf.recompute_grad`."""

    name: ClassVar[str] = "checkpointing"
    off: ClassVar[Any] = "off"
    hook: ClassVar[str | None] = "blocks"
    words = ("off", "on")
    fidelity = Fidelity.EXACT

    def after_build(self, workload: Any) -> None:
        """Wrap the call of each block."""
        if self.active:
            for block in workload.blocks():
                block.call = _recomputed(block.call)


def _recomputed(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, recomputed in the backward; `tf.recompute_grad` adds to every argument, which a boolean does not bear."""
    import tensorflow as tf

    def recomputed(*arguments: Any) -> Any:
        real = [index for index, argument in enumerate(arguments) if argument.dtype.is_floating]

        def with_others(*given: Any) -> Any:
            filled = dict(zip(real, given, strict=True))
            return call(*(filled.get(index, argument) for index, argument in enumerate(arguments)))

        return tf.recompute_grad(with_others)(*(arguments[index] for index in real))

    return recomputed


class Clip(clipping.Clip):
    """The largest gradient norm of each network (`tf.clip_by_global_norm`), or `off`."""

    def clipped(self, gradients: Sequence[Any], scale: Any) -> Sequence[Any]:
        """The gradients of a network, which a loss scaler has multiplied by `scale`, at no more than the norm."""
        if not self.active:
            return gradients
        import tensorflow as tf

        clipped, _ = tf.clip_by_global_norm(gradients, self.value * scale)
        return list(clipped)


class Xla(Toggle):
    """`true` compiles the train step with XLA: `tf.function(jit_compile=True)`."""

    name: ClassVar[str] = "xla"
    off: ClassVar[Any] = False
    fidelity = Fidelity.ROUNDING


class Allocation(Technique):
    """How the process takes the card's memory: `grab` all at once, `growth`, or a limit in GiB."""

    name: ClassVar[str] = "allocation"
    off: ClassVar[Any] = "grab"
    fidelity = Fidelity.EXACT

    @classmethod
    def parse(cls, value: Any) -> Any:
        """`grab`, `growth`, or a positive number."""
        if value in ("grab", "growth"):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            if value >= 2**-10:
                return float(value)
            raise BadInput(f"technique allocation takes a limit of at least 1 MiB, in GiB, not {value!r}")
        raise unknown("allocation value", value, ("grab", "growth", "a number of GiB"))

    @property
    def limit_bytes(self) -> int | None:
        """The limit, whole MiB as TensorFlow takes it; None without one."""
        return int(self.value * 2**10) * 2**20 if isinstance(self.value, float) else None


class Beside(Choice):
    """What else is on the card: `jax`, which takes 75 % of it at its first operation, or `nothing`."""

    name: ClassVar[str] = "beside"
    off: ClassVar[Any] = "nothing"
    words = ("nothing", "jax")
    fidelity = Fidelity.EXACT


TECHNIQUES: dict[str, type[Technique]] = {
    technique.name: technique
    for technique in (BatchSize, Sharing, Accumulation, Precision, Checkpointing, Clip, Xla, Allocation, Beside)
}
"""Every technique by name."""
