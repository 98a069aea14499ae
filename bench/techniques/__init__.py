"""The techniques: one module per family, each knowing no workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.errors import BadInput, Refused, unknown
from bench.techniques.base import Fidelity, Technique
from bench.techniques.batch import Accumulation, BatchSize
from bench.techniques.checkpointing import Checkpointing
from bench.techniques.clearing import SetToNone
from bench.techniques.clipping import Clip
from bench.techniques.offload import Offload
from bench.techniques.precision import Precision
from bench.techniques.sharding import Reshard, Sharding
from bench.techniques.sharing import Sharing
from bench.workload import Workload

__all__ = ["TECHNIQUES", "Fidelity", "Technique", "check", "fidelity", "make_plan"]

TECHNIQUES: dict[str, type[Technique]] = {
    technique.name: technique
    for technique in (
        BatchSize,
        Sharing,
        Accumulation,
        Precision,
        Checkpointing,
        Offload,
        Sharding,
        Reshard,
        SetToNone,
        Clip,
    )
}
"""Every technique by name, in the order in which they act: blocks are wrapped before units are sharded."""


def make_plan(values: Mapping[str, Any]) -> dict[str, Technique]:
    """One technique of every kind, at its value in `values` or off.

    Raises:
        BadInput: `values` names a technique or a value that does not exist.
    """
    for name in values:
        if name not in TECHNIQUES:
            raise unknown("technique", name, TECHNIQUES)
    return {name: kind(values.get(name, kind.off)) for name, kind in TECHNIQUES.items()}


def check(plan: Mapping[str, Technique], workload: type[Workload], settings: Any) -> None:
    """Check every technique against the settings as those before it leave them.

    Raises:
        Refused: The workload cannot take one of them.
        BadInput: It could, but not with this value.
    """
    for technique in plan.values():
        technique.check(workload, settings)
        if (obstacle := technique.obstacle(plan)) is not None:
            raise Refused(f"{workload.__name__} cannot take {technique.name}={technique.value}: {obstacle}")
        try:
            settings = technique.settings(settings)
        except ValueError as error:  # settings that contradict each other
            line = str(error).strip().partition("\n")[0]
            raise BadInput(f"{workload.__name__} with {technique.name}={technique.value}: {line}") from error


def fidelity(plan: Mapping[str, Technique], baseline: Mapping[str, Technique]) -> Fidelity:
    """What the techniques that differ from the baseline do to the gradient, the worst of them."""
    order = list(Fidelity)
    changed = [plan[name].fidelity for name in plan if plan[name].value != baseline[name].value]
    return max(changed, key=order.index, default=Fidelity.EXACT)
