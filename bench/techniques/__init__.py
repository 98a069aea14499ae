"""The techniques: one module per family, each knowing no workload.

What a technique does differs by framework, and a process holds one framework only, so each has a table of its own:
`table` is PyTorch's, `bench.tf.techniques` TensorFlow's. Nothing here imports either framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from bench.errors import BadInput, Refused, unknown
from bench.frameworks import find_framework, load
from bench.techniques.base import Fidelity, Technique

__all__ = ["Fidelity", "Technique", "check", "fidelity", "make_plan", "techniques_of"]


def techniques_of(framework: str) -> Mapping[str, type[Technique]]:
    """Every technique of a framework by name, in the order in which they act."""
    return cast(Mapping[str, type[Technique]], load(find_framework(framework).techniques))


def make_plan(values: Mapping[str, Any], framework: str = "torch") -> dict[str, Technique]:
    """One technique of every kind that the framework has, at its value in `values` or off.

    Raises:
        BadInput: `values` names a technique or a value that does not exist.
    """
    kinds = techniques_of(framework)
    for name in values:
        if name not in kinds:
            raise unknown("technique", name, kinds)
    return {name: kind(values.get(name, kind.off)) for name, kind in kinds.items()}


def check(plan: Mapping[str, Technique], workload: type[Any], settings: Any) -> None:
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
