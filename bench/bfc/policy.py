"""How a TensorFlow process takes memory of a card, alone or beside another process.

Followed: `SingleVirtualDeviceMemoryLimit`, `MinSystemMemory` and `CreateDevices` in
tensorflow/core/common_runtime/gpu/gpu_device.cc and the constructor in gpu_bfc_allocator.cc beside it (sources of
2024, which the wheel does not contain), and `_compute_device_options` in tensorflow/python/eager/context.py (the 2.21
wheel). The environment is not read; of its variables TF_FORCE_GPU_ALLOW_GROWTH, TF_DEVICE_MIN_SYS_MEMORY_IN_MB,
TF_ENABLE_GPU_GARBAGE_COLLECTION and TF_GPU_ALLOCATOR would change what is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.bfc.allocator import BfcAllocator
from bench.bfc.sub_allocator import Card

MIB: Final = 2**20

SMALL_CARD_BYTES: Final = 2**31
"""With less than this available the reserve is ... (MinSystemMemory)"""
SMALL_CARD_RESERVE_BYTES: Final = 225 * MIB
"""... this."""
RESERVE_BYTES: Final = {6: 500 * MIB, 7: 1050 * MIB, 8: 1536 * MIB}
"""Otherwise the reserve of cards up to this major compute capability, the first that applies, or ..."""
NEWEST_RESERVE_BYTES: Final = 1800 * MIB
"""... of all newer ones."""

JAX_FRACTION: Final = 0.75
"""Part of a card that JAX takes at its first operation unless told otherwise (docs.jax.dev, GPU memory allocation;
`GpuAllocatorConfig.memory_fraction` in xla/pjrt/plugin/xla_gpu/xla_gpu_allocator_config.h)."""


@dataclass(frozen=True)
class MemoryPolicy:
    """What a process told TensorFlow about the card's memory before its first use.

    Attributes:
        growth: `tf.config.experimental.set_memory_growth`.
        limit_bytes: `memory_limit` of `tf.config.set_logical_device_configuration`, whole MiB; None: not called.
            TensorFlow does not compare it with what is free, and takes it at once.

    Raises:
        ValueError: Both are set, which TensorFlow refuses, or a limit is not a positive number of whole MiB.
    """

    growth: bool = False
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.limit_bytes is None:
            return
        if self.growth:
            raise ValueError("TensorFlow takes either memory growth or a memory limit, not both")
        if self.limit_bytes < MIB or self.limit_bytes % MIB:
            raise ValueError(f"a memory limit is a positive number of whole MiB, not {self.limit_bytes} bytes")


GRAB: Final = MemoryPolicy()
"""TensorFlow's default: all that is available less a reserve, at once."""
GROWTH: Final = MemoryPolicy(growth=True)
"""The same limit, taken as it is needed."""


def reserve_bytes(available_bytes: int, major: int) -> int:
    """What TensorFlow leaves of the available memory for other libraries (MinSystemMemory).

    Args:
        available_bytes: Free on the card when TensorFlow first uses it, its CUDA context already counted.
        major: Compute capability of the card, first number.
    """
    if available_bytes < SMALL_CARD_BYTES:
        return SMALL_CARD_RESERVE_BYTES
    return next((reserve for upto, reserve in RESERVE_BYTES.items() if major <= upto), NEWEST_RESERVE_BYTES)


def limit_bytes(available_bytes: int, major: int, policy: MemoryPolicy) -> int:
    """The limit of the process's allocator (SingleVirtualDeviceMemoryLimit); arguments as of `reserve_bytes`.

    On a card with less than the reserve available, TensorFlow takes all of it.
    """
    if policy.limit_bytes is not None:
        return policy.limit_bytes
    reserve = reserve_bytes(available_bytes, major)
    return available_bytes - reserve if reserve < available_bytes else available_bytes


def allocator_on_card(
    capacity_bytes: int,
    compute_capability: tuple[int, int],
    policy: MemoryPolicy = GRAB,
    *,
    outside_bytes: int = 0,
    others_bytes: int = 0,
) -> BfcAllocator:
    """The allocator of a TensorFlow process that is about to use a card for the first time.

    What lies outside the allocator is taken for constant: the limit is computed as if all of it was there at the
    start. A process that loads kernels or libraries later gets a limit larger by that, and as much less room for it.

    Args:
        capacity_bytes: The card's memory as the driver gives it (the total of cudaMemGetInfo).
        compute_capability: Such as (8, 9).
        policy: How the process takes memory.
        outside_bytes: What this process holds beside the allocator: CUDA context and libraries.
        others_bytes: What other processes hold.

    Raises:
        ValueError: A negative size, a compute capability below 1, or nothing left for the process.
    """
    if min(outside_bytes, others_bytes) < 0:
        raise ValueError("no process holds less than 0 bytes")
    if compute_capability[0] < 1 or compute_capability[1] < 0:
        raise ValueError(f"there is no compute capability {compute_capability}")
    available_bytes = capacity_bytes - outside_bytes - others_bytes
    if available_bytes <= 0:
        raise ValueError(
            f"nothing is left of {capacity_bytes} bytes: {outside_bytes} lie outside the allocator, "
            f"{others_bytes} in other processes"
        )
    return BfcAllocator(
        limit_bytes(available_bytes, compute_capability[0], policy),
        growth=policy.growth,
        garbage_collection=True,  # the default of TF_ENABLE_GPU_GARBAGE_COLLECTION (GetGarbageCollectionValue)
        sub_allocator=Card(available_bytes),
    )


def jax_pool_bytes(capacity_bytes: int, free_bytes: int, fraction: float = JAX_FRACTION) -> int:
    """What JAX takes of a card at its first operation, its CUDA context not counted.

    A fraction of the whole card, whatever is free, through the same allocator with growth off (`CreateBFCAllocator` in
    xla/pjrt/gpu/gpu_helpers.cc). Where that is not free, the allocator backs off by steps of 0.9. JAX releases of 2026
    may grow beyond it later (policy `0.75+`).

    Args:
        capacity_bytes: The card's memory as the driver gives it.
        free_bytes: What of it is free.
        fraction: XLA_PYTHON_CLIENT_MEM_FRACTION, XLA_CLIENT_MEM_FRACTION in newer releases.

    Raises:
        ValueError: A fraction that is not above 0 and at most 1, or more free than there is.
        BfcExhausted: Nothing is free.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"a fraction of the card is above 0 and at most 1, not {fraction}")
    if free_bytes > capacity_bytes:
        raise ValueError(f"{free_bytes} bytes cannot be free on a card of {capacity_bytes}")
    pool = BfcAllocator(int(capacity_bytes * fraction), growth=False, sub_allocator=Card(free_bytes), name="jax")
    pool.allocate(1)
    return pool.pool_bytes
