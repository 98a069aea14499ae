"""Shard parameters, gradients and optimizer states over the group, by FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from bench.techniques.base import Fidelity, Technique
from bench.techniques.choice import Choice, Toggle
from bench.techniques.offload import Offload
from bench.techniques.precision import Precision
from bench.workload import Shardable, Workload


class Sharding(Choice):
    """`fsdp` shards the workload's units with FSDP2 (`fully_shard`) over all ranks; one rank works too.

    In half precision parameters are gathered in the half type and gradients reduced in float32, as verl does.
    """

    name: ClassVar[str] = "sharding"
    off: ClassVar[Any] = "off"
    hook: ClassVar[str | None] = "shards"
    words = ("off", "fsdp")
    fidelity = Fidelity.ROUNDING

    def prepare(self, workload: Workload, plan: Mapping[str, Technique], device: torch.device) -> None:
        """Apply `fully_shard` to each unit."""
        offload = cast(Offload, plan["offload"])
        if not self.active and not offload.parameters:
            return
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        half = cast(Precision, plan["precision"]).dtype
        policy = MixedPrecisionPolicy(half, torch.float32) if half else MixedPrecisionPolicy()
        place = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload.parameters else OffloadPolicy()
        for unit in cast(Shardable, workload).shards():
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=plan["reshard"].value, mp_policy=policy, offload_policy=place
            )


class Reshard(Toggle):
    """FSDP's `reshard_after_forward`: False keeps gathered parameters from forward to backward."""

    name: ClassVar[str] = "reshard"
    off: ClassVar[Any] = True
    hook: ClassVar[str | None] = "shards"
    fidelity = Fidelity.EXACT

    def obstacle(self, plan: Mapping[str, Technique]) -> str | None:
        """Without FSDP nothing is gathered."""
        sharded = plan["sharding"].active or cast(Offload, plan["offload"]).parameters
        return "sharding is off" if self.active and not sharded else None
