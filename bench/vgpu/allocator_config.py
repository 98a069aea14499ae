"""Settings of the caching allocator: its constants, and the syntax of `PYTORCH_CUDA_ALLOC_CONF`.

Sources, torch 2.13: constants and keys from c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h (the wheel
ships both); value checks from c10/core/AllocatorConfig.cpp, tried on the wheel with
`torch._C._accelerator_setAllocatorSettings`. torch passes over malformed separators; here they are errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MIB = 2**20
MIN_BLOCK_BYTES = 512  # kMinBlockSize: sizes are multiples of it
SMALL_REQUEST_BYTES = MIB  # kSmallSize: up to here a request belongs to the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own ...
SEGMENT_ROUNDING_BYTES = 2 * MIB  # kRoundLarge: ... rounded up to this
DIVISION_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: powers of two from 1 MiB to 64 GiB

ENVIRONMENT_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_NO_BYTES = frozenset(  # about the host, locks or graph capture: device memory is the same with any value
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)
_ONLY_VALUE = {"backend": "native", "throw_on_cudamalloc_oom": "False"}  # other values are not simulated

_ENTRY = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")


@dataclass(frozen=True)
class AllocatorConfig:
    """What `PYTORCH_CUDA_ALLOC_CONF` can set, with torch's defaults.

    Attributes:
        max_split_size_bytes: Blocks from this size on are never split; None: no limit.
        roundup_power2_divisions: Divisions per power of two that requests are rounded up to: one number for all sizes,
            or 16 for the intervals that start at 1 MiB, 2 MiB, ... 32 GiB (the first also serves what is smaller, the
            last what is larger). 0 and 1 round to 512 bytes.
        garbage_collection_threshold: Share of the allowed memory above which old cached blocks are released; acts only
            with a memory fraction below 1. None: never.
        expandable_segments: Grow one segment per pool and stream page by page, in place of a cudaMalloc per segment.
        per_process_memory_fraction: Share of the card's total memory that may be reserved.
        large_segment_size_bytes: Segment that requests over 1 MiB and below 10 MiB share; page of a large expandable
            segment.
        max_non_split_rounding_bytes: A request of at least `max_split_size_bytes` takes a cached block only if that is
            smaller than the request plus this; None: `large_segment_size_bytes`.

    Raises:
        ValueError: A value is outside the range that torch accepts.
    """

    max_split_size_bytes: int | None = None
    roundup_power2_divisions: int | tuple[int, ...] = 0
    garbage_collection_threshold: float | None = None
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    large_segment_size_bytes: int = 20 * MIB
    max_non_split_rounding_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.large_segment_size_bytes <= OWN_SEGMENT_BYTES:
            raise ValueError(f"large_segment_size must be over 10 MiB, not {self.large_segment_size_bytes} bytes")
        for name in ("max_split_size_bytes", "max_non_split_rounding_bytes"):
            value = getattr(self, name)
            if value is not None and value < self.large_segment_size_bytes:
                least = self.large_segment_size_bytes // MIB
                raise ValueError(f"{name.removesuffix('_bytes')} must be at least {least} MiB, not {value} bytes")
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"garbage_collection_threshold must lie between 0 and 1, not {threshold}")
        if not 0 <= self.per_process_memory_fraction <= 1:
            raise ValueError(f"per_process_memory_fraction must be in [0, 1], not {self.per_process_memory_fraction}")
        divisions = self.roundup_power2_divisions
        if isinstance(divisions, tuple) and len(divisions) != DIVISION_INTERVALS:
            raise ValueError(f"roundup_power2_divisions needs {DIVISION_INTERVALS} values, not {len(divisions)}")
        for value in divisions if isinstance(divisions, tuple) else (divisions,):
            if value < 0 or value & (value - 1):
                raise ValueError(f"roundup_power2_divisions must be a power of two or 0, not {value}")

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Read the environment syntax: `key:value,key:value`, lists as `[256:1,512:2,>:4]`, sizes in MiB.

        Raises:
            ValueError: A key is unknown (the message names the nearest one), a value is out of range, or what it asks
                for is not simulated (`backend:cudaMallocAsync`, `throw_on_cudamalloc_oom:True`).
        """
        settings: dict[str, object] = {}
        text = "".join(text.split())
        position = 0
        while position < len(text):
            entry = _ENTRY.match(text, position)
            if entry is None:
                raise ValueError(f"allocator setting {text[position:]!r} is not of the form key:value")
            key, value = entry.groups()
            position = entry.end()
            if key in _READERS:
                field, read = _READERS[key]
                settings[field] = read(key, value)
            elif value != _ONLY_VALUE.get(key, value):
                raise ValueError(f"allocator setting {key}:{value} is not simulated, only {key}:{_ONLY_VALUE[key]}")
            elif key not in _NO_BYTES and key not in _ONLY_VALUE:
                raise _unknown(key)
        return cls(**settings)  # type: ignore[arg-type]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AllocatorConfig:
        """Settings of the first variable that is set, in torch's order: PYTORCH_CUDA_ALLOC_CONF comes first.

        Raises:
            ValueError: As `parse`.
        """
        for name in ENVIRONMENT_VARIABLES:
            if name in environ:
                return cls.parse(environ[name])
        return cls()

    def text(self) -> str:
        """The environment's syntax for what is not as torch has it by default; sizes in whole MiB."""
        default = AllocatorConfig()
        return ",".join(
            f"{key}:{_text(getattr(self, field), field)}"
            for key, (field, _) in _READERS.items()
            if getattr(self, field) != getattr(default, field)
        )

    def rounded(self, requested_bytes: int) -> int:
        """Bytes of the block that serves a request (round_size and roundup_power2_next_division)."""
        if requested_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        divisions = self.roundup_power2_divisions
        if isinstance(divisions, tuple):
            interval = requested_bytes.bit_length() - MIB.bit_length()
            divisions = divisions[min(max(interval, 0), DIVISION_INTERVALS - 1)]
        step = MIN_BLOCK_BYTES
        if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << requested_bytes.bit_length() - 1) // divisions
        return -(-requested_bytes // step) * step

    def segment_bytes(self, rounded_bytes: int) -> int:
        """Bytes that cudaMalloc is asked for when no cached block serves the request (get_allocation_size)."""
        if rounded_bytes <= SMALL_REQUEST_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded_bytes < OWN_SEGMENT_BYTES:
            return self.large_segment_size_bytes
        return -(-rounded_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


def _text(value: object, field: str) -> str:
    """One value as `parse` reads it."""
    if isinstance(value, tuple):
        return "[" + ",".join(f"{1 << index}:{number}" for index, number in enumerate(value)) + "]"
    if isinstance(value, int) and field.endswith("_bytes"):
        return str(value // MIB)
    return str(value)


def _mebibytes(key: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{key} needs a whole number of MiB, not {value!r}")
    return int(value) * MIB


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{key} needs a number, not {value!r}") from None


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{key} needs True or False, not {value!r}")
    return value == "True"


def _divisions(key: str, value: str) -> int | tuple[int, ...]:
    """One number, or `[boundary in MiB:number,...,>:number]`.

    A boundary names the interval that starts there. The first one's number also serves all smaller sizes, `>` all
    intervals after the last one named; an interval in between that is not named stays at 0.
    """
    if not value.startswith("["):
        number = _division(key, value)
        if number == 0:
            raise ValueError(f"{key} must be a power of two, not 0")
        return number
    table = [0] * DIVISION_INTERVALS
    last = 0
    first = True
    for item in value[1:-1].rstrip(",").split(","):
        boundary, _, text = item.partition(":")
        number = _division(key, text)
        if boundary == ">":
            table[last + 1 :] = [number] * (DIVISION_INTERVALS - last - 1)
            continue
        start = _division(key, boundary)
        if start == 0:
            raise ValueError(f"{key}: a boundary must be a power of two, not 0")
        last = min(start.bit_length() - 1, DIVISION_INTERVALS - 1)
        if first:
            table[:last] = [number] * last
            first = False
        table[last] = number
    return tuple(table)


def _division(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) & (int(text) - 1):
        raise ValueError(f"{key} needs powers of two, not {text!r}")
    return int(text)


def _unknown(key: str) -> ValueError:
    known = sorted({*_READERS, *_NO_BYTES, *_ONLY_VALUE})
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown allocator setting {key!r}: {hint}known: {', '.join(known)}")


_READERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _truth),
    "garbage_collection_threshold": ("garbage_collection_threshold", _number),
    "large_segment_size_mb": ("large_segment_size_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_size_bytes", _mebibytes),
    "per_process_memory_fraction": ("per_process_memory_fraction", _number),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}
