"""What each technique says of the gradient is so: proved in float64 on every workload's tiny preset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.errors import Refused
from bench.techniques import Fidelity, fidelity, make_plan, offload
from bench.trainer import Trainer
from bench.workload import Workload, load_workload

PATHS = {
    "maddpg": "workloads.maddpg_hopper:MaddpgHopper",
    "seq2seq": "workloads.seq2seq_beam:Seq2SeqBeam",
    "transformer": "workloads.fsdp_transformer:FsdpTransformer",
}
OFF = {"precision": "fp32", "sharding": "off"}
"""Full precision, as float64 shows what is exact; the rounding of half precision is the precision's own test."""

TECHNIQUES: list[dict[str, Any]] = [
    {"accumulation": 2},
    {"accumulation": 4, "checkpointing": "on"},
    {"checkpointing": "on"},
    {"checkpointing": "reentrant"},
    {"offload": "activations"},
    {"offload": "activations", "checkpointing": "on"},
    {"offload": "parameters"},
    {"set_to_none": False},
    {"sharding": "fsdp"},
    {"sharding": "fsdp", "reshard": False, "checkpointing": "on"},
]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def trainer_for(path: str, values: dict[str, Any]) -> Trainer:
    workload: type[Workload] = load_workload(path)
    settings = workload.presets["tiny"]
    plan = make_plan({**workload.baseline, **OFF, **values})
    for technique in plan.values():
        technique.check(workload, settings)
    torch.manual_seed(0)
    return Trainer(workload, settings, plan, torch.device("cpu"))


def gradients(path: str, values: dict[str, Any], updates: int = 1) -> dict[str, torch.Tensor]:
    """Gradients by parameter name after `updates` updates."""
    trainer = trainer_for(path, values)
    for _ in range(updates):
        trainer.step()
    trainer.gradients()
    found = {}
    for network_name, network in trainer.workload.networks.items():
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None, name
            grad = parameter.grad
            found[f"{network_name}.{name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu")
@pytest.mark.parametrize("values", TECHNIQUES, ids=str)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_the_gradient_is_kept(path: str, values: dict[str, Any]) -> None:
    plan = make_plan(values)
    assert fidelity(plan, make_plan({})) in (Fidelity.EXACT, Fidelity.ROUNDING)
    try:
        got = gradients(path, values)
    except Refused as refusal:
        pytest.skip(str(refusal))
    expected = gradients(path, {})
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_exact_techniques_are_exact_to_the_bit(path: str) -> None:
    expected = gradients(path, {})
    for values in ({"checkpointing": "on"}, {"offload": "activations"}):
        got = gradients(path, values)
        assert all(torch.equal(got[name], expected[name]) for name in expected), values


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_optimizer_states_that_travel_are_the_same(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []

    def elsewhere(state: torch.Tensor, *_: Any) -> torch.Tensor:
        moved = state.clone()
        state.fill_(torch.nan)  # whoever still holds the one that was left behind shows
        moves.append(moved.numel())
        return moved

    expected = gradients(path, {}, updates=3)
    monkeypatch.setattr(offload, "_to_host", elsewhere)
    monkeypatch.setattr(offload, "_to_card", elsewhere)
    got = gradients(path, {"offload": "optimizer"}, updates=3)
    assert len(moves) >= 5 * len(expected)  # out, and in and out twice
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_half_precision_rounds(path: str) -> None:
    torch.set_default_dtype(torch.float32)
    expected, got = gradients(path, {}), gradients(path, {"precision": "bf16"})
    assert all(gradient.dtype is torch.float32 for gradient in got.values())
    assert any(not torch.equal(got[name], expected[name]) for name in expected)
    # Beam search picks other hypotheses once scores are rounded; the direction of the whole gradient stays.
    if "seq2seq" not in path:
        flat = [torch.cat([g.flatten() for g in grads.values()]) for grads in (got, expected)]
        assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.98


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu")
def test_offloaded_parameters_are_gathered_in_half_precision() -> None:
    torch.set_default_dtype(torch.float32)
    plain = {"precision": "bf16"}
    offloaded = {**plain, "offload": "activations+parameters"}
    assert fidelity(make_plan(offloaded), make_plan(plain)) is Fidelity.ROUNDING
    before, after = (gradients(PATHS["transformer"], values) for values in (plain, offloaded))
    assert any(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_clipping_scales_what_is_longer(path: str) -> None:
    limit = 1e-3
    trainer = trainer_for(path, {"clip": limit})
    trainer.gradients()
    before = {
        id(p): p.grad.clone() for n in trainer.workload.networks.values() for p in n.parameters() if p.grad is not None
    }
    trainer.update()
    for network in trainer.workload.networks.values():
        parameters = [p for p in network.parameters() if p.grad is not None]
        norm = torch.cat([before[id(p)].flatten() for p in parameters]).norm()
        clipped = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm()
        assert clipped == pytest.approx(min(float(norm), limit), rel=1e-3)


def test_the_worst_change_counts() -> None:
    baseline = make_plan({"precision": "bf16"})
    assert fidelity(make_plan({"precision": "bf16"}), baseline) is Fidelity.EXACT
    assert fidelity(make_plan({"precision": "bf16", "checkpointing": "on"}), baseline) is Fidelity.EXACT
    assert fidelity(make_plan({"precision": "bf16", "accumulation": 2}), baseline) is Fidelity.ROUNDING
    assert fidelity(make_plan({"precision": "fp32", "batch_size": 2}), baseline) is Fidelity.CHANGES


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_batch_size_and_sharing_change_the_settings(path: str) -> None:
    workload = load_workload(path)
    plan = make_plan({**workload.baseline, **OFF, "batch_size": 2, "sharing": "separate"})
    trainer = Trainer(workload, workload.presets["tiny"], plan, torch.device("cpu"))
    expected = dataclasses.replace(workload.presets["tiny"], batch_size=2, sharing="separate")
    assert trainer.workload.settings == expected  # type: ignore[attr-defined]
