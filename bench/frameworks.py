"""The frameworks that a workload can be written in, and which part of the harness belongs to each.

Nothing here imports one: two frameworks never share a process, as each would take the card's memory for itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from bench.errors import Refused, unknown
from bench.record import Source


@dataclass(frozen=True)
class Framework:
    """One framework. Parts of the harness are named by import path, "package.module:name".

    Attributes:
        name: As in `framework=...`.
        package: What has to be importable.
        extra: The extra of oombench that installs it; None: it is always there.
        protocol: The shape of its workloads.
        techniques: The table of its techniques.
        run_cell: What runs a cell.
        wishes: What its `run_cell` can be asked for beside numbers.
        preloaded: Whether workers are forked from a process that has imported it once; TensorFlow's threads do not
            survive a fork.
        obstacle: What says why nothing can be measured on a card of a given title; None as its answer: something can.
        absent: How numbers are got where the target's card is absent.
    """

    name: str
    package: str
    extra: str | None
    protocol: str
    techniques: str
    run_cell: str
    wishes: frozenset[str]
    preloaded: bool
    obstacle: str
    absent: Source

    def check_installed(self) -> None:
        """Raise `Refused`, with the line that installs it, where the framework is missing."""
        if find_spec(self.package) is None:
            raise Refused(f"{self.name} is not installed: pip install -e '.[{self.extra}]'")


FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            name="torch",
            package="torch",
            extra=None,
            protocol="bench.workload:Workload",
            techniques="bench.techniques.table:TECHNIQUES",
            run_cell="bench.cell:run_cell",
            wishes=frozenset({"explain"}),
            preloaded=True,
            obstacle="bench.host:why_not_measured",
            absent=Source.PREDICTED,
        ),
        Framework(
            name="tensorflow",
            package="tensorflow",
            extra="tf",
            protocol="bench.tf.workload:Workload",
            techniques="bench.tf.techniques:TECHNIQUES",
            run_cell="bench.tf.cell:run_cell",
            wishes=frozenset({"profile"}),
            preloaded=False,
            obstacle="bench.host:missing_card",  # whether its build has CUDA, only a process that imports it can tell
            absent=Source.EMULATED,
        ),
    )
}
"""Every framework by name; the first is the default."""


def find_framework(name: object) -> Framework:
    """The framework called `name`.

    Raises:
        BadInput: There is none; the message names the nearest.
    """
    if name not in FRAMEWORKS:
        raise unknown("framework", name, FRAMEWORKS)
    return FRAMEWORKS[str(name)]


def framework_of(workload: type[Any]) -> Framework:
    """What a workload class is written in: its `framework`, torch where it does not say."""
    return find_framework(getattr(workload, "framework", "torch"))


def load(path: str) -> Any:
    """What stands at "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
