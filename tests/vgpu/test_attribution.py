"""Who made what lives: module, operator, line; every column adds up, and nothing remains when it ends."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

import bench.vgpu as vgpu
from bench.vgpu.attribution import OUTSIDE, UNKNOWN, Allocation, Attribution, attributing
from bench.vgpu.memory import Held

MIB = 2**20
WIDTH = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = hidden.exp()
        hidden = hidden.sin()
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def line(function: Callable[..., Any], text: str, suffix: str = "") -> str:
    """What an allocation says that the line of `function` with this text made."""
    lines, start = inspect.getsourcelines(function)
    [number] = [start + offset for offset, source in enumerate(lines) if source.strip() == text]
    return f"{__name__}.py:{number} in {function.__name__}{suffix}"


@pytest.fixture
def card() -> Iterator[vgpu.Device]:
    with vgpu.virtual_gpu("k80") as device:
        yield device


@pytest.fixture
def attribution(card: vgpu.Device) -> Iterator[Attribution]:
    with attributing(card) as found:
        yield found


def batch() -> Tensor:
    return torch.randn(256, WIDTH, device="vgpu")


def everything(card: vgpu.Device, attribution: Attribution, action: Callable[[], Any]) -> list[Allocation]:
    """All that an action allocates, in order, whether it lives on or not."""
    held: list[Held] = []
    card.memory.watchers.append(held.append)
    kept = action()
    card.memory.watchers.remove(held.append)
    del kept
    return [attribution.described(each, None) for each in held]


def peak_adds_up(found: list[Allocation]) -> None:
    for column in range(1, 5):
        sums: Counter[str] = Counter()
        for made in found:
            sums[made[column]] += made.size_bytes
        assert sum(sums.values()) == torch.vgpu.max_memory_allocated()
    assert [made.size_bytes for made in found] == sorted((made.size_bytes for made in found), reverse=True)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_column_adds_up_to_the_peak(attribution: Attribution, checkpointed: bool) -> None:
    model = Model(checkpointed).to("vgpu")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        gc.collect()
        torch.vgpu.reset_peak_memory_stats()
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
        peak_adds_up(attribution.at_peak())


def test_the_forward_belongs_to_the_module_that_runs(card: vgpu.Device, attribution: Attribution) -> None:
    made = everything(card, attribution, lambda: Model().to("vgpu")(batch()))
    exp = [each for each in made if each.line == line(Block.forward, "hidden = hidden.exp()")]
    assert [each.module for each in exp] == ["Model.blocks.0", "Model.blocks.1"]
    assert {(each.operator, each.text) for each in exp} == {("aten.exp.default", "hidden = hidden.exp()")}
    linear = [each.module for each in made if each.operator == "aten.addmm.default" and each.size_bytes == MIB // 2]
    assert linear == ["Model.blocks.0.up", "Model.blocks.0.down", "Model.blocks.1.up", "Model.blocks.1.down"]


def test_parameters_and_optimizer_states_belong_to_the_module_that_owns_them(attribution: Attribution) -> None:
    model = Model().to("vgpu")
    attribution.name(model, "policy")
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(batch()).sum().backward()
    optimizer.step()
    size = WIDTH * WIDTH * 4
    owned = Counter((each.category, each.module) for each in attribution.at_peak() if each.size_bytes == size)
    assert owned["parameters", "policy.blocks.0.up"] == 1
    assert owned["gradients", "policy.blocks.0.up"] == 1
    assert owned["optimizer", "policy.blocks.0.up"] == 2


def test_the_backward_belongs_to_the_line_whose_forward_it_undoes(card: vgpu.Device, attribution: Attribution) -> None:
    output = Model().to("vgpu")(batch()).sum()
    made = everything(card, attribution, output.backward)
    cos = [each for each in made if each.operator == "aten.cos.default"]
    assert [each.line for each in cos] == [line(Block.forward, "hidden = hidden.sin()", " (backward)")] * 2
    assert [each.module for each in cos] == ["Model.blocks.1", "Model.blocks.0"]
    weights = [each.module for each in made if each.size_bytes == WIDTH * WIDTH * 4]
    assert weights == ["Model.blocks.1.down", "Model.blocks.1.up", "Model.blocks.0.down", "Model.blocks.0.up"]


def test_views_and_the_users_own_backward_keep_their_lines(card: vgpu.Device, attribution: Attribution) -> None:
    class Repeat(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.repeat(2, 1)[: len(grad)]

    def compute(x: Tensor) -> Tensor:
        x = x[: len(x) // 2]
        x = Repeat.apply(x)
        return x.cos().sum()

    loss = compute(batch().requires_grad_())
    made = {each.operator: each.line for each in everything(card, attribution, loss.backward)}
    assert made["aten.sin.default"] == line(compute, "return x.cos().sum()", " (backward)")
    assert made["aten.repeat.default"] == line(Repeat.backward, "return grad.repeat(2, 1)[: len(grad)]")
    assert made["aten.slice_backward.default"] == line(compute, "x = x[: len(x) // 2]", " (backward)")


def test_recomputation_belongs_to_the_module_that_is_recomputed(card: vgpu.Device, attribution: Attribution) -> None:
    output = Model(checkpointed=True).to("vgpu")(batch()).sum()
    made = everything(card, attribution, output.backward)
    exp = [each for each in made if each.line == line(Block.forward, "hidden = hidden.exp()")]
    assert [(each.module, each.operator) for each in exp] == [
        ("Model.blocks.1", "aten.exp.default"),
        ("Model.blocks.0", "aten.exp.default"),
    ]


def test_a_failure_within_a_module_leaves_no_module_running(card: vgpu.Device, attribution: Attribution) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no")

    with pytest.raises(KeyError):
        nn.Sequential(nn.Linear(WIDTH, WIDTH).to("vgpu"), Broken())(batch())
    [outside] = everything(card, attribution, lambda: torch.ones(MIB, device="vgpu"))
    assert outside.module == OUTSIDE


def test_running_out_of_memory_is_explained_by_what_lived_then(attribution: Attribution) -> None:
    def fill() -> None:
        kept = []
        while True:
            kept.append(torch.empty(2**30, dtype=torch.uint8, device="vgpu"))

    with pytest.raises(torch.OutOfMemoryError):
        fill()
    found = attribution.at_failure()
    assert len(found) == 10
    assert sum(each.size_bytes for each in found) == 10 * 2**30
    assert {each.text for each in found} == {'kept.append(torch.empty(2**30, dtype=torch.uint8, device="vgpu"))'}


def test_what_was_made_before_is_told_as_not_recorded(card: vgpu.Device) -> None:
    before = torch.ones(MIB, device="vgpu")
    with attributing(card) as attribution:
        after = torch.ones(MIB, device="vgpu")
        lines = sorted(each.line for each in attribution.at_peak())
    assert lines[0] == UNKNOWN
    assert lines[1].startswith(__name__)
    del before, after


def test_it_is_off_unless_asked_for_and_leaves_nothing(card: vgpu.Device) -> None:
    def hooks() -> tuple[int, ...]:
        kinds = (module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks)
        return (*map(len, kinds), len(module_hooks._global_forward_hooks_always_called))

    assert (card.attribution, card.memory.watchers, hooks()) == (None, [], (0, 0, 0))
    with attributing(card):
        assert hooks() == (1, 1, 1)
    assert (card.attribution, card.memory.watchers, hooks()) == (None, [], (0, 0, 0))
    with pytest.raises(ZeroDivisionError), attributing(card):
        1 / 0  # noqa: B018
    assert hooks() == (0, 0, 0)
    tensor = torch.ones(MIB, device="vgpu")
    assert [held.origin for held in card.memory.at_peak()] == [None]
    del tensor


def test_it_changes_no_byte() -> None:
    def peaks(asked: bool) -> list[int]:
        with vgpu.virtual_gpu("k80") as device:
            model = Model().to("vgpu")
            optimizer = torch.optim.Adam(model.parameters())

            def step() -> int:
                gc.collect()
                torch.vgpu.reset_peak_memory_stats()
                optimizer.zero_grad()
                model(batch()).sum().backward()
                optimizer.step()
                return int(torch.vgpu.max_memory_allocated())

            if not asked:
                return [step(), step()]
            with attributing(device):
                return [step(), step()]

    assert peaks(asked=True) == peaks(asked=False)
