"""What a recorded run would have needed under another allocator configuration, or on another card."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BadInput
from bench.replay import CannotReplay, Outcome, Plan, recorded_capacity, replay
from bench.resolve import find_target
from bench.show import printable
from bench.snapshot import Snapshot, read_snapshot
from bench.vgpu.allocator_config import DIVISION_INTERVALS, AllocatorConfig
from bench.window import Start, start_of


@dataclass(frozen=True)
class Recorded:
    """What the snapshot itself says, in bytes; what it does not tell is None.

    Attributes:
        peak_reserved_bytes: Highest bytes in segments since the trace begins.
        end_reserved_bytes: In segments, at the end.
        end_allocated_bytes: In blocks, at the end.
        retries: Requests amid which segments were released, or that failed; others leave no trace.
        failures: Requests that failed.
        capacity_bytes: What the card can hand out.
    """

    peak_reserved_bytes: int
    end_reserved_bytes: int
    end_allocated_bytes: int
    retries: int
    failures: int
    capacity_bytes: int | None


@dataclass(frozen=True)
class Replays:
    """A snapshot and its replays.

    Attributes:
        snapshot: What was read.
        start: What there was before its trace.
        recorded: What it says itself.
        own_config: How its allocator was configured.
        own: Replayed so.
        config: The configuration that is asked about.
        capacity_bytes: What the card that is asked about can hand out; None: not known.
        target: Its name; None: the card of the recording.
        asked: Replayed so; None: nothing else than `own` is asked.
        remarks: What is not exact, and why.
    """

    snapshot: Snapshot
    start: Start
    recorded: Recorded
    own_config: AllocatorConfig
    own: Outcome
    config: AllocatorConfig
    capacity_bytes: int | None
    target: str | None
    asked: Outcome | None
    remarks: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON; bytes."""
        return {
            "snapshot": self.snapshot.name,
            "device": self.snapshot.device,
            "events": len(self.snapshot.events),
            "from_first_allocation": self.start.empty,
            "recorded": dataclasses.asdict(self.recorded) | {"configuration": self.own_config.text()},
            "replayed": self.own.to_dict() | {"configuration": self.own_config.text()},
            "instead": None
            if self.asked is None
            else self.asked.to_dict()
            | {
                "configuration": self.config.text(),
                "target": self.target,
                "capacity_bytes": self.capacity_bytes,
            },
            "remarks": self.remarks,
        }


def what_if(path: Path, alloc_conf: str | None, target: str | None, device: int | None) -> Replays:
    """Replay the snapshot at `path` as it was configured, and otherwise if so asked.

    Args:
        path: The snapshot.
        alloc_conf: A configuration in the syntax of PYTORCH_CUDA_ALLOC_CONF; None: the recording's own.
        target: Name of a card; None: the recording's own, whose size may not be known.
        device: Index of the device; None: the first one.

    Raises:
        BadInput: A word or the file is wrong, or it has no trace.
    """
    config = None if alloc_conf is None else parsed(alloc_conf)
    snapshot = read_snapshot(path, device)
    card = None if target is None else find_target(target)
    if not snapshot.events:
        raise BadInput(f"{path} has no trace: record one with torch.cuda.memory._record_memory_history()")
    own_plan, remarks = plan_of(snapshot)
    plan = own_plan if config is None else dataclasses.replace(own_plan, config=config)
    if card is not None:
        plan = dataclasses.replace(plan, capacity_bytes=card.capacity_bytes, total_bytes=card.memory_bytes)
    try:
        own = replay(own_plan)
        asked = None if plan is own_plan else replay(dataclasses.replace(plan, own=False))
    except CannotReplay as error:
        raise BadInput(f"{path} is refused: {error}") from error
    recorded = _recorded(own_plan)
    remarks += _remarks(own_plan, recorded, own, asked, plan.capacity_bytes)
    return Replays(
        snapshot=snapshot,
        start=own_plan.start,
        recorded=recorded,
        own_config=own_plan.config,
        own=own,
        config=plan.config,
        capacity_bytes=plan.capacity_bytes,
        target=None if card is None else card.name,
        asked=asked,
        remarks=remarks,
    )


def plan_of(snapshot: Snapshot) -> tuple[Plan, list[str]]:
    """How to replay a snapshot as it was recorded, and what about that is uncertain."""
    config, remarks = own_configuration(snapshot)
    start = start_of(snapshot, config)
    known_bytes, peak_bytes = recorded_capacity(snapshot, start)
    plan = Plan(
        snapshot=snapshot,
        start=start,
        config=config,
        capacity_bytes=known_bytes,
        total_bytes=None,
        own=True,
        recorded_limit_bytes=peak_bytes
        if known_bytes is None
        else int(config.per_process_memory_fraction * known_bytes),
        collected=config.garbage_collection_threshold is not None,
    )
    return plan, remarks


def parsed(alloc_conf: str) -> AllocatorConfig:
    """The configuration that the words describe, a wrong one being bad input."""
    try:
        return AllocatorConfig.parse(alloc_conf)
    except ValueError as error:
        raise BadInput(f"--alloc-conf: {error}") from error


def own_configuration(snapshot: Snapshot) -> tuple[AllocatorConfig, list[str]]:
    """How the recording's allocator was configured, and what about that is uncertain."""
    settings = snapshot.settings
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF")
    try:
        if isinstance(text, str) and text:
            return AllocatorConfig.parse(text), []
        if settings:
            return _from_settings(settings), []
    except (ValueError, TypeError) as error:
        return _guessed(snapshot), [printable(f"the recording's own configuration is not simulated: {error}")]
    return _guessed(snapshot), ["the snapshot does not say how its allocator was configured: taken for the default"]


def _from_settings(settings: dict[str, Any]) -> AllocatorConfig:
    """The fields that torch writes beside the text, as they are where settings were made by a call."""
    split = settings.get("max_split_size", -1)
    threshold = settings.get("garbage_collection_threshold", 0.0)
    divisions = settings.get("roundup_power2_divisions", {})
    values = tuple(divisions.values()) if isinstance(divisions, dict) else ()
    if not all(type(value) is int for value in values) or type(split) is not int:
        raise ValueError("a setting that is not a number")
    return AllocatorConfig(
        max_split_size_bytes=split if 0 < split < 2**62 else None,
        roundup_power2_divisions=values if len(values) == DIVISION_INTERVALS and any(values) else 0,
        garbage_collection_threshold=threshold if threshold else None,
        expandable_segments=settings.get("expandable_segments") is True,
    )


def _guessed(snapshot: Snapshot) -> AllocatorConfig:
    pages = any(event.action == "segment_map" for event in snapshot.events)
    return AllocatorConfig(expandable_segments=pages or any(segment.expandable for segment in snapshot.segments))


def _recorded(plan: Plan) -> Recorded:
    snapshot = plan.snapshot
    reserved = peak = plan.start.reserved_bytes
    retries = 0
    before: int | None = None  # reserved when the latest segments were released
    for event in snapshot.events:
        if event.action in ("segment_alloc", "segment_map"):
            retries += before is not None and before + event.size_bytes > plan.recorded_limit_bytes
            reserved += event.size_bytes
            peak = max(peak, reserved)
            before = None
        elif event.action in ("segment_free", "segment_unmap"):
            before = reserved if before is None else before
            reserved -= event.size_bytes
        elif event.action == "oom":  # a request is tried again before it fails
            retries += 1
            before = None
        else:
            before = None
    failures = sum(event.action == "oom" for event in snapshot.events)
    known_bytes = plan.capacity_bytes
    return Recorded(peak, snapshot.reserved_bytes, snapshot.allocated_bytes, retries, failures, known_bytes)


def _remarks(
    plan: Plan, recorded: Recorded, own: Outcome, asked: Outcome | None, capacity_bytes: int | None
) -> list[str]:
    start = plan.start
    remarks = []
    same = (own.peak_reserved_bytes, own.end_reserved_bytes) == (
        recorded.peak_reserved_bytes,
        recorded.end_reserved_bytes,
    )
    if not same:
        remarks.append("replayed as it was configured, reserved does not come out as recorded: read both as estimates")
    if not start.empty:
        count = len(start.blocks)
        if asked is not None:
            remarks.append(f"the trace begins with {count} blocks there already: allocated anew, by address")
        elif start.expandable:
            remarks.append(f"the trace begins with {count} blocks in expandable segments: allocated anew, by address")
        elif start.derived:
            remarks.append(
                f"the trace begins with {count} blocks there already; the sizes of {start.derived} are derived"
            )
    if start.contradictions:
        remarks.append(f"{start.contradictions} events do not fit the segments at the end")
    unmatched = max(own.unmatched, asked.unmatched if asked is not None else 0)
    if unmatched:
        remarks.append(f"{unmatched} frees or releases are of blocks that the trace does not tell of")
    if recorded.retries and capacity_bytes is None:
        remarks.append(
            f"the snapshot does not say how much its card has: {recorded.retries} releases amid a request are repeated "
            "as recorded; --target names a card"
        )
    if any(event.pool != (0, 0) for event in plan.snapshot.events):
        remarks.append("memory pools of the program are replayed as streams of their own")
    return remarks
