"""The target table: what is known of a card, and of the group it stands in. Plain data; no framework is imported."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Group:
    """Cards that train together: `nodes` x `cards`, with the bandwidth of one card in one direction, in bytes/s."""

    nodes: int = 1
    cards: int = 1
    nvlink_bytes_s: float = 0.0
    network_bytes_s: float = 0.0


@dataclass(frozen=True)
class Target:
    """A card, alone or as one of a group. Bytes, seconds, FLOP; the sources stand in targets.yaml.

    Attributes:
        name: As users write it.
        title: As `torch.cuda.get_device_name` shows it.
        memory_bytes: Total memory as PyTorch shows it.
        outside_bytes: What one process holds outside PyTorch's allocator; None where nobody published it.
        capability: CUDA compute capability.
        multiprocessors: Streaming multiprocessors.
        bandwidth_bytes_s: Memory bandwidth.
        attained_bytes_s: What kernels attain of it.
        flops_s: Dense peak by arithmetic type; a type that the card lacks is absent.
        matmul_flops_s: Attained by large matrix products, by arithmetic type.
        pcie_bytes_s: Host link, one direction.
        host_bandwidth_bytes_s: Host memory bandwidth.
        launch_s: Seconds that the host is busy with an operator that launches a kernel, Python around it included.
        view_s: The same of an operator that launches none.
        group: The cards it trains with.
    """

    name: str
    title: str
    memory_bytes: int
    outside_bytes: int | None
    capability: tuple[int, int]
    multiprocessors: int
    bandwidth_bytes_s: float
    attained_bytes_s: float
    flops_s: Mapping[str, float]
    matmul_flops_s: Mapping[str, float]
    pcie_bytes_s: float
    host_bandwidth_bytes_s: float
    launch_s: float
    view_s: float
    group: Group = field(default_factory=Group)

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.group.nodes * self.group.cards

    @property
    def capacity_bytes(self) -> int:
        """What the allocator can get of the card: its memory less what the process holds outside it."""
        return self.memory_bytes - (self.outside_bytes or 0)


def _target(name: str, row: Mapping[str, Any]) -> Target:
    peaks = {kind: rate * 1e12 for kind, rate in row["flops_tflop_s"].items()}
    attained = {kind: rate * 1e12 for kind, rate in row["matmul_tflop_s"].items()}
    group = row.get("group", {})
    outside_mib = row["outside_mib"]
    return Target(
        name=name,
        title=row["title"],
        memory_bytes=int(row["memory_gib"] * GIB),
        outside_bytes=None if outside_mib is None else int(outside_mib * MIB),
        capability=tuple(row["capability"]),
        multiprocessors=row["multiprocessors"],
        bandwidth_bytes_s=row["bandwidth_gb_s"] * 1e9,
        attained_bytes_s=row["attained_gb_s"] * 1e9,
        flops_s=peaks,
        matmul_flops_s={**peaks, **attained},
        pcie_bytes_s=row["pcie_gb_s"] * 1e9,
        host_bandwidth_bytes_s=row["host_bandwidth_gb_s"] * 1e9,
        launch_s=row["host_us"]["launch"] * 1e-6,
        view_s=row["host_us"]["view"] * 1e-6,
        group=Group(
            nodes=group.get("nodes", 1),
            cards=group.get("cards", 1),
            nvlink_bytes_s=group.get("nvlink_gb_s", 0) * 1e9,
            network_bytes_s=group.get("network_gb_s", 0) * 1e9,
        ),
    )


def _table() -> dict[str, Target]:
    rows = yaml.safe_load(files("bench").joinpath("targets.yaml").read_text())
    return {name: _target(name, row) for name, row in rows.items()}


TARGETS: Mapping[str, Target] = _table()
"""Every known target by name, in the order of the table."""


def find_target(name: str) -> Target:
    """The target called `name`.

    Raises:
        ValueError: There is none; the message names the nearest and lists the known ones.
    """
    if name in TARGETS:
        return TARGETS[name]
    near = difflib.get_close_matches(name, TARGETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown target {name!r}: {hint}known: {', '.join(TARGETS)}")
