"""What a cell reports: one `Record`, one JSON line. Bytes and seconds; GiB and ms belong to the report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a cell ended. Everything but `OK` carries a reason."""

    OK = "ok"
    OOM = "oom"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    CRASH = "crash"


class Source(StrEnum):
    """How a number was got."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    EMULATED = "emulated"


@dataclass(frozen=True)
class Peak:
    """Memory of one step at its peak, in bytes.

    Attributes:
        allocated_bytes: `max_memory_allocated` over the step.
        reserved_bytes: `max_memory_reserved` over the step.
        process_bytes: What nvidia-smi shows: reserved, context and libraries.
        categories: Bytes of the allocated peak by category; empty where the device cannot tell (a real card).
    """

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int | None = None
    categories: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Time of one steady step, in seconds.

    Attributes:
        step_s: Median over the timed steps.
        bound_s: Seconds of the step by what bounded it (`host`, `compute`, `bandwidth`, `transfer`, `collective`);
            empty for a measurement.
    """

    step_s: float
    bound_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """The outcome of one cell.

    Attributes:
        key: Hash of the resolved configuration.
        cell: The resolved configuration: workload, preset, settings, techniques, target, source, steps.
        status: How it ended.
        source: Measured, predicted or emulated.
        reason: Why it ended otherwise than `ok`, in one line.
        first: The first step, in which optimizer states appear; after an OOM, what was reached.
        steady: A later step.
        static_bytes: Allocated after a step: weights, gradients, optimizer states, workspaces.
        static_tensor_bytes: What the tensors behind it asked for, by category; empty where the device cannot tell.
        timing: Steady step time.
        items_per_step: Items that a step consumes, in `unit`.
        unit: What an item is.
        parameter_counts: Trained parameters by part of each network ("critic.first").
        traces: How often TensorFlow traced the step's functions; None for a framework that does not trace.
        gradient: What the techniques do to the gradient: `exact`, `rounding` or `changes training`.
        notes: Remarks that a reader must know: stand-in answers, operators without a rule.
        explanation: What occupied the memory at the last step's peak, or when it ran out, if that was asked for.
        provenance: Versions, host, commit, card, and when.
    """

    key: str
    cell: dict[str, Any]
    status: Status
    source: Source
    reason: str | None = None
    first: Peak | None = None
    steady: Peak | None = None
    static_bytes: int | None = None
    static_tensor_bytes: dict[str, int] = field(default_factory=dict)
    timing: Timing | None = None
    items_per_step: int | None = None
    unit: str | None = None
    parameter_counts: dict[str, int] = field(default_factory=dict)
    traces: int | None = None
    gradient: str | None = None
    notes: list[str] = field(default_factory=list)
    explanation: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: `data` is not a record.
        """
        values = dict(data)
        values["status"] = Status(values["status"])
        values["source"] = Source(values["source"])
        for name, kind in (("first", Peak), ("steady", Peak), ("timing", Timing)):
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        return cls(**values)
