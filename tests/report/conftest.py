"""Made-up records that hold every case a report has to tell apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from bench.record import Peak, Record, Source, Status, Timing
from bench.report.frame import tidy

MIB, GIB = 2**20, 2**30
SEQ2SEQ, MADDPG = "workloads.seq2seq_beam:Seq2SeqBeam", "workloads.maddpg_hopper:MaddpgHopper"
OFF = {
    "batch_size": None,
    "accumulation": 1,
    "precision": "fp32",
    "checkpointing": False,
    "offload": "off",
    "sharing": "off",
    "sharding": "off",
    "reshard": True,
    "clip": None,
}
BASELINES: dict[str, dict[str, Any]] = {SEQ2SEQ: OFF, MADDPG: OFF | {"sharing": "all"}}
CAPACITIES = {"rtx4090": int(23.52 * GIB), "k80": int(11.17 * GIB)}
SETTINGS = {SEQ2SEQ: {"batch_size": 16, "beam": 64, "source_length": 472}, MADDPG: {"batch_size": 32, "width": 64}}
PRESETS = {SEQ2SEQ: "thread", MADDPG: "stock"}
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 944.00 MiB. GPU 0 has a total capacity of 11.17 GiB of which 310.81 MiB is "
    "free. Asked for by aten.add.Tensor at workloads/seq2seq_beam.py:120 in attend."
)


def peak(allocated: float, unit: int = GIB, split: bool = True, fixed: float = 0.11) -> Peak:
    """A peak whose categories sum to it: `fixed` units of each of three states, the rest activations and others."""
    allocated_bytes = int(allocated * unit)
    state = int(fixed * unit)
    workspace, temporaries = int(0.03 * allocated_bytes), int(0.08 * allocated_bytes)
    categories = {
        "parameters": state,
        "gradients": state,
        "optimizer": 2 * state,
        "temporaries": temporaries,
        "workspace": workspace,
    }
    categories["activations"] = allocated_bytes - sum(categories.values())
    reserved_bytes = -(-int(allocated_bytes * 1.02) // (2 * MIB)) * 2 * MIB
    return Peak(allocated_bytes, reserved_bytes, reserved_bytes + 480 * MIB, categories if split else {})


def make(
    allocated: float | None = None,
    ms: float | None = None,
    *,
    workload: str = SEQ2SEQ,
    target: str = "rtx4090",
    source: Source = Source.PREDICTED,
    status: Status | str = Status.OK,
    size: int = GIB,
    items: int = 51_200,
    settings: dict[str, Any] | None = None,
    preset: str | None = None,
    bound: str = "bandwidth",
    **fields: Any,
) -> Record:
    """A record; keywords that name a technique set it, others are the record's own fields."""
    techniques = BASELINES[workload] | {name: fields.pop(name) for name in OFF if name in fields}
    cell = {
        "workload": workload,
        "preset": preset or PRESETS[workload],
        "settings": settings or SETTINGS[workload],
        "techniques": techniques,
        "target": target,
        "source": source.value,
        "steps": {"memory": 2, "warmup": 0, "timed": 1},
    }
    split = source == Source.PREDICTED
    done = status == Status.OK and allocated is not None
    seconds = None if ms is None else ms / 1e3
    values: dict[str, Any] = {
        "key": hashlib.sha256(json.dumps(cell).encode()).hexdigest()[:16],
        "first": None if allocated is None else peak(allocated * 0.97 if done else allocated, size, split),
        "steady": peak(allocated, size, split) if done and allocated is not None else None,
        "timing": None
        if seconds is None
        else Timing(seconds, {bound: 0.8 * seconds, "host": 0.2 * seconds} if split else {}),
        "items_per_step": items,
        "unit": "tokens",
        "gradient": "exact",
    }
    return Record(cell=cell, status=Status(status), source=source, **(values | fields))


@pytest.fixture
def record() -> Callable[..., Record]:
    return make


def seq2seq(target: str = "rtx4090") -> list[Record]:
    """Fifteen configurations: out of memory, refused, timed out, crashed, exact and not, one measured as well."""
    oom: dict[str, Any] = {"status": Status.OOM, "reason": CUDA_OOM, "target": target}
    on: dict[str, Any] = {"target": target}
    note = "3 stand-in answers of .item(): the control flow of the optimizer depends on one"
    return [
        make(21.4, 612, notes=["Beam bookkeeping is not timed"], **on),
        make(13.2, 471, precision="bf16", gradient="rounding", notes=["Beam bookkeeping is not timed", note], **on),
        make(21.4, 613.1, clip=1.0, **on),
        make(11.8, 668, accumulation=2, **on),
        make(6.9, 742, accumulation=4, **on),
        make(4.3, 921, accumulation=8, bound="host", **on),
        make(3.1, 1310, accumulation=16, bound="host", **on),
        make(7.4, 803, checkpointing=True, **on),
        make(3.2, 990, checkpointing=True, accumulation=4, **on),
        make(2.1, 702, checkpointing=True, accumulation=4, precision="bf16", gradient="rounding", **on),
        make(11.5, 321, batch_size=8, gradient="changes training", items=25_600, **on),
        make(9.9, 2410, offload="activations", bound="transfer", **on),
        make(22.9, 600, reshard=False, **on),
        make(22.95, sharing="none", **oom),
        make(23.1, batch_size=32, **oom),
        make(status=Status.REFUSED, sharding="full", reason="Seq2SeqBeam cannot take sharding=full: no shards()", **on),
        make(4.1, checkpointing=True, offload="activations", status=Status.TIMEOUT, reason="no result in 600 s", **on),
        make(status=Status.CRASH, offload="states", reason="RuntimeError: a|b\nsecond line", **on),
    ]


def both_sources() -> list[Record]:
    """`seq2seq`, three of whose configurations were measured too."""
    card: dict[str, Any] = {"source": Source.MEASURED}
    return [
        *seq2seq(),
        make(21.3, 634, **card),
        make(13.4, 480, precision="bf16", gradient="rounding", **card),
        make(6.8, 770, accumulation=4, **card),
        make(22.9, sharing="none", status=Status.OOM, reason=CUDA_OOM, **card),
    ]


def baseline_oom() -> list[Record]:
    """A card on which only some configurations fit, the baseline not among them."""
    oom: dict[str, Any] = {"status": Status.OOM, "reason": CUDA_OOM, "target": "k80"}
    on: dict[str, Any] = {"target": "k80"}
    return [
        make(10.2, **oom),
        make(10.3, accumulation=2, **oom),
        make(10.6, clip=1.0, **oom),
        make(6.9, 4742, accumulation=4, **on),
        make(10.4, 5803, checkpointing=True, **on),
        make(3.2, 5990, checkpointing=True, accumulation=4, **on),
    ]


def small() -> list[Record]:
    """A workload of a few MiB, far below the card, whose baseline is not "off" in everything."""
    on: dict[str, Any] = {"workload": MADDPG, "size": MIB, "unit": "transitions", "items": 960, "bound": "host"}
    return [
        make(21.6, 3.21, **on),
        make(21.6, 3.31, clip=5.0, **on),
        make(22.1, 3.9, sharing="none", gradient="changes training", **on),
        make(21.5, 6.1, accumulation=4, **on),
        make(20.9, 3.4, precision="bf16", gradient="rounding", **on),
    ]


@pytest.fixture(scope="session")
def records() -> dict[str, list[Record]]:
    return {"seq2seq": seq2seq(), "both": both_sources(), "baseline_oom": baseline_oom(), "small": small()}


@pytest.fixture(scope="session")
def baselines() -> dict[str, dict[str, Any]]:
    return BASELINES


@pytest.fixture(scope="session")
def capacities() -> dict[str, int]:
    return CAPACITIES


@pytest.fixture(scope="session")
def tables(records: dict[str, list[Record]]) -> dict[str, pd.DataFrame]:
    """The table of each set of records, by name."""
    return {name: tidy(of_set, BASELINES, CAPACITIES) for name, of_set in records.items()}
