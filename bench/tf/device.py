"""Where a TensorFlow cell runs: the card of this machine, or this machine's processor with the card's allocator.

On the processor TensorFlow is told to use the allocator that it uses on a card (TF_CPU_ALLOCATOR_USE_BFC, 2.21:
`ProcessState::GetCPUAllocator` in tensorflow/core/common_runtime/process_state.cc). What tensors take in it is then
read from TensorFlow itself; what the process would hold of the card follows from `bench.bfc`, as the processor's
allocator always grows and is never given the card at once.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import host
from bench.bfc import GRAB, GROWTH, BfcAllocator, MemoryPolicy, allocator_on_card, jax_pool_bytes, replay
from bench.errors import Refused
from bench.record import Peak
from bench.targets import Target
from bench.tf.recording import Recording

if TYPE_CHECKING:
    from bench.tf.techniques import Allocation, Beside

GIB = 2**30
MIB = 2**20


def memory_policy(allocation: Allocation) -> MemoryPolicy:
    """How the technique makes TensorFlow take memory."""
    if (limit_bytes := allocation.limit_bytes) is not None:
        return MemoryPolicy(limit_bytes=limit_bytes)
    return GROWTH if allocation.value == "growth" else GRAB


class Device:
    """What TensorFlow computes on.

    Args:
        target: The card.
        allocation: How the process takes the card's memory.
        beside: What else is on the card.
        profile: Folder to keep TensorFlow's profiles in.

    Attributes:
        name: TensorFlow's name of it.
        timed: Whether the time of a step is the card's.
    """

    name: str
    timed: bool

    def __init__(self, target: Target, allocation: Allocation, beside: Beside, profile: Path | None = None) -> None:
        self.target = target
        self.policy = memory_policy(allocation)
        self.profile = profile

    def configure(self) -> None:
        """Tell TensorFlow, before it uses the device."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Around a part of the run: "build", "step_0", ..."""
        return nullcontext()

    def in_use_bytes(self) -> int:
        """In chunks that are handed out now."""
        return int(self._info()["current"])

    def reset_peak(self) -> None:
        """Let the peak be what is in use now."""
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(self.name)

    def peak(self) -> Peak:
        """The peak since `reset_peak`."""
        raise NotImplementedError

    def completed(self, peaks: list[Peak]) -> tuple[list[Peak], str | None]:
        """The peaks of the steps with what is known of them at the end, and why the card could not have held them."""
        return peaks, None

    def close(self) -> None:
        """Throw away what was recorded and nobody asked to keep."""

    def failure(self, error: Exception) -> str:
        """What running out of memory says of the card, in one line.

        Raises:
            MemoryError: Nothing.
        """
        lines = [line for line in str(error).splitlines() if "OOM" in line or "ut of memory" in line]
        return re.sub(r"\{\{.*?\}\}|\[Op:.*|\.$", "", " ".join((lines[0] if lines else str(error)).split())).strip()

    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        return []

    def _info(self) -> dict[str, int]:
        import tensorflow as tf

        return dict(tf.config.experimental.get_memory_info(self.name))


class Emulated(Device):
    """The processor in place of the card; made before TensorFlow is imported, which reads its variables then.

    Attributes:
        limit_bytes: What the allocator can have on the card.
        free_bytes: What this machine has free; where that is less, running out of it says nothing of the card.
        others_bytes: What somebody else holds of the card.
    """

    name = "CPU:0"
    timed = False

    def __init__(self, target: Target, allocation: Allocation, beside: Beside, profile: Path | None = None) -> None:
        super().__init__(target, allocation, beside, profile)
        self.others_bytes = jax_pool_bytes(target.memory_bytes, target.capacity_bytes) if beside.active else 0
        self.limit_bytes = min(self._allocator().limit_bytes, target.capacity_bytes - self.others_bytes)
        self.free_bytes = host.free_memory_bytes()
        self._recording = Recording(profile)
        os.environ |= {
            "TF_CPU_ALLOCATOR_USE_BFC": "1",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(min(self.free_bytes, self.limit_bytes) // MIB),
            "TF_ENABLE_ONEDNN_OPTS": "0",  # its kernels take temporaries that no card's kernel does
            "CUDA_VISIBLE_DEVICES": "-1",
        }

    def configure(self) -> None:
        """One operator at a time, as on a stream of a card."""
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Record every allocation inside."""
        return self._recording.part(name)

    def peak(self) -> Peak:
        """What TensorFlow says of its allocator; the pool on the card is known at the end."""
        return Peak(int(self._info()["peak"]), 0)

    def completed(self, peaks: list[Peak]) -> tuple[list[Peak], str | None]:
        """The peaks with the pool of a process on the card, in which the same allocations were made again."""
        found, reason = [], None
        _, *of_steps = self._recording.events()
        for peak, events in zip(peaks, of_steps, strict=True):
            outcome = replay(events, self._allocator())
            pool_bytes = outcome.peak_pool_bytes
            found.append(replace(peak, reserved_bytes=pool_bytes, process_bytes=self._process_bytes(pool_bytes)))
            reason = None if outcome.exhausted is None else str(outcome.exhausted)
        return found, reason

    def close(self) -> None:
        """Throw away the recording, unless somebody asked to keep it."""
        self._recording.close()

    def failure(self, error: Exception) -> str:
        """The line of TensorFlow's own error, unless this machine has less memory than the card."""
        if self.free_bytes < self.limit_bytes:
            raise MemoryError(
                f"{self.free_bytes / GIB:.2f} GiB are free on this machine, too little to emulate the "
                f"{self.limit_bytes / GIB:.2f} GiB that the process could have on {self.target.name}"
            ) from error
        return super().failure(error)

    def notes(self) -> list[str]:
        """How the numbers came about."""
        notes = [
            "emulated: allocated is what TensorFlow's own BFC allocator handed out on the processor, which differs a "
            "little from process to process; reserved and process are what the same allocations make of the pool on "
            "the card; the processor's step time says nothing of the card's and is left out"
        ]
        if self.target.outside_bytes is None:
            notes.append("no published figure for memory outside the allocator: process memory unknown")
        return notes

    def _process_bytes(self, pool_bytes: int) -> int | None:
        """What nvidia-smi would show: the pool, context and libraries, and JAX in the same process."""
        outside_bytes = self.target.outside_bytes
        return None if outside_bytes is None else pool_bytes + outside_bytes + self.others_bytes

    def _allocator(self) -> BfcAllocator:
        return allocator_on_card(
            self.target.memory_bytes,
            self.target.capability,
            self.policy,
            outside_bytes=self.target.outside_bytes or 0,
            others_bytes=self.others_bytes,
        )


class Present(Device):
    """The card of this machine that is called as the target is."""

    name = "GPU:0"
    timed = True

    def __init__(self, target: Target, allocation: Allocation, beside: Beside, profile: Path | None = None) -> None:
        super().__init__(target, allocation, beside, profile)
        self._pool_of_jax = _take_pool_of_jax() if beside.active else None
        self._outside_bytes = 0

    def configure(self) -> None:
        """Choose the card, tell TensorFlow how to take its memory, and see what it takes before the first tensor."""
        import tensorflow as tf

        cards = tf.config.list_physical_devices("GPU")
        names = [tf.config.experimental.get_device_details(card).get("device_name") for card in cards]
        if self.target.title not in names:
            raise Refused(f"TensorFlow sees no {self.target.title}: pip install 'tensorflow[and-cuda]'")
        card = cards[names.index(self.target.title)]
        tf.config.set_visible_devices(card, "GPU")
        if self.policy.limit_bytes is not None:
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=self.policy.limit_bytes // MIB)
            tf.config.set_logical_device_configuration(card, [limit])
        else:
            tf.config.experimental.set_memory_growth(card, self.policy.growth)
        tf.config.list_logical_devices("GPU")  # makes the context; the pool comes with the first tensor
        self._outside_bytes = host.process_bytes(title=self.target.title) or 0

    def part(self, name: str) -> AbstractContextManager[None]:
        """Record a profile, if it is wanted: it takes time."""
        return nullcontext() if self.profile is None else Recording(self.profile).part(name)

    def peak(self) -> Peak:
        """What TensorFlow and NVML say; the pool is what the process holds more than before its first tensor."""
        process_bytes = host.process_bytes(title=self.target.title)
        pool_bytes = max(0, (process_bytes or 0) - self._outside_bytes)
        return Peak(int(self._info()["peak"]), pool_bytes, process_bytes)


def _take_pool_of_jax() -> Any:
    """Let JAX take its part of the card, as an import that touches JAX first does; it lives as long as this value."""
    try:
        import jax.numpy as jnp  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise Refused("beside=jax needs JAX with CUDA: pip install 'jax[cuda]'") from error
    return jnp.zeros(1)
