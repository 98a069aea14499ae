"""Values of techniques: what is taken, and what the user is told otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from bench.errors import BadInput, Refused
from bench.techniques import check, make_plan
from bench.techniques.table import TECHNIQUES


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("batch_size", 4, 4),
        ("batch_size", None, None),
        ("accumulation", 2, 2),
        ("precision", "bf16", "bf16"),
        ("checkpointing", True, "on"),
        ("checkpointing", False, "off"),
        ("checkpointing", "reentrant", "reentrant"),
        ("offload", "off", "off"),
        ("offload", "optimizer+activations", "activations+optimizer"),
        ("sharing", None, None),
        ("sharing", "separate", "separate"),
        ("sharding", "fsdp", "fsdp"),
        ("reshard", False, False),
        ("reshard", "off", False),  # as tables print it
        ("set_to_none", "on", True),
        ("set_to_none", False, False),
        ("clip", 1, 1.0),
        ("clip", False, "off"),
    ],
)
def test_values_are_taken(name: str, given: Any, value: Any) -> None:
    assert TECHNIQUES[name].parse(given) == value


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("batch_size", 0, "technique batch_size takes a positive whole number, not 0"),
        ("accumulation", 1.5, "technique accumulation takes a positive whole number, not 1.5"),
        ("accumulation", True, "technique accumulation takes a positive whole number, not True"),
        ("precision", "b16", "unknown precision value 'b16': did you mean 'bf16'? known: fp32, fp16, bf16"),
        ("precision", True, "unknown precision value 'on': known: fp32, fp16, bf16"),
        ("checkpointing", "reentrent", "did you mean 'reentrant'?"),
        ("offload", "activation", "did you mean 'activations'?"),
        ("offload", "optimizer+parameters", "leave out optimizer"),
        ("reshard", "no", "unknown reshard value 'no'"),
        ("clip", -1, "technique clip takes a positive number or off, not -1"),
    ],
)
def test_bad_values_are_explained(name: str, given: Any, message: str) -> None:
    with pytest.raises(BadInput) as error:
        TECHNIQUES[name].parse(given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_technique_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="unknown technique 'precison': did you mean 'precision'"):
        make_plan({"precison": "bf16"})


@dataclass(frozen=True)
class Bare:
    batch_size: int = 6


class Plain:
    """A workload without hooks."""


class Sharded:
    """A workload with units to shard."""

    def shards(self) -> list[nn.Module]:
        return []


@pytest.mark.parametrize(
    ("name", "value", "missing"),
    [
        ("checkpointing", "on", r"no blocks\(\)"),
        ("sharding", "fsdp", r"no shards\(\)"),
        ("reshard", False, r"no shards\(\)"),
        ("offload", "parameters", r"no shards\(\)"),
        ("sharing", "separate", "no 'sharing'"),
    ],
)
def test_what_a_workload_lacks_is_refused_by_name(name: str, value: Any, missing: str) -> None:
    technique = TECHNIQUES[name](value)
    with pytest.raises(Refused, match=f"Plain cannot take {name}=.*{missing}"):
        technique.check(Plain, Bare())  # type: ignore[arg-type]


def test_keeping_gathered_parameters_is_refused_where_nothing_is_sharded() -> None:
    workload, settings = Sharded, Bare()
    for values in ({"reshard": False, "sharding": "fsdp"}, {"reshard": False, "offload": "parameters"}):
        check(make_plan(values), workload, settings)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="Sharded cannot take reshard=False: sharding is off"):
        check(make_plan({"reshard": False}), workload, settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TECHNIQUES)
def test_off_is_never_refused(name: str) -> None:
    kind = TECHNIQUES[name]
    technique = kind(kind.off)
    assert not technique.active
    technique.check(Plain, Bare())  # type: ignore[arg-type]


def test_a_batch_that_does_not_divide_is_the_users_to_correct() -> None:
    with pytest.raises(BadInput, match="batch size 6 is not divisible by accumulation 4"):
        TECHNIQUES["accumulation"](4).check(Plain, Bare())  # type: ignore[arg-type]
