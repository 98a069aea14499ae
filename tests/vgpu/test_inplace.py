"""Autograd writes in place on the card where it does without a dispatch mode, by the judgement of a run on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench.vgpu as vgpu
from bench.vgpu.mode import VirtualMode

COUNTED = {
    name + suffix
    for name in ("add", "index_put", "put", "scatter", "scatter_add", "index_add", "logical_and")
    for suffix in ("", "_")
}


class Graph:
    """Backwards on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def leaf(self, *shape: int) -> Tensor:
        return torch.rand(*shape or (4, 4), device=self.device, requires_grad=True)

    def plain(self, *shape: int) -> Tensor:
        return torch.rand(*shape or (4, 4), device=self.device)

    def index(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)


def used_twice(graph: Graph) -> None:
    weight = graph.leaf()
    (weight @ weight).backward(graph.plain())


def two_branches(graph: Graph) -> None:
    x = graph.leaf() * 1
    (x.sin() + x.cos()).backward(graph.plain())


def residual_with_a_gradient_that_is_held(graph: Graph) -> None:
    x, gradient = graph.leaf() * 1, graph.plain()
    (x + x.sin()).backward(gradient)


def residual(graph: Graph) -> None:
    x = graph.leaf() * 1
    ((x + x.sin()) * 2).backward(graph.plain())


def residual_of_a_sum(graph: Graph) -> None:
    x = graph.leaf()
    (x + x.sin()).sum().backward()  # expanded gradients are not dense


def three_branches(graph: Graph) -> None:
    x = graph.leaf()
    (x.sin() + x.cos() + x.exp()).backward(graph.plain())


def gradient_kept_by_a_hook(graph: Graph) -> None:
    x, kept = graph.leaf() * 1, []
    one = x.sin()
    one.register_hook(kept.append)
    x.register_hook(kept.append)
    (one + x.cos()).backward(graph.plain())


def hook_that_adds(graph: Graph) -> None:
    x = graph.leaf() * 1
    x.register_hook(lambda gradient: gradient + 1)
    (x.sin() + x.cos()).backward(graph.plain())


def retained_gradient(graph: Graph) -> None:
    x = graph.leaf() * 1
    x.retain_grad()
    (x.sin() + x.cos()).backward(graph.plain())


def transposed(graph: Graph) -> None:
    x = graph.leaf() * 1
    (x.t() @ x).backward(graph.plain())


def views(graph: Graph) -> None:
    x = graph.leaf()
    (x + x * x + x.view(16).view(4, 4)).backward(graph.plain())


def chunks(graph: Graph) -> None:
    x = graph.leaf()
    one, other = x.chunk(2)
    (one.sin() + other.cos() + one * other).sum().backward()


def selections(graph: Graph) -> None:
    x = graph.leaf()
    (x[0].sum() + x[1].sum() + x[:, 0].sum()).backward()


def second_derivative(graph: Graph) -> None:
    x = graph.leaf()
    (gradient,) = torch.autograd.grad(x.sin() + x.cos(), x, graph.plain(), create_graph=True)
    gradient.sum().backward()


def twice_into_the_same_gradient(graph: Graph) -> None:
    layer = nn.Linear(4, 4).to(graph.device)
    for _ in range(2):
        layer(graph.plain()).sum().backward()


def tied_embedding(graph: Graph) -> None:
    weight = graph.leaf()
    hidden = F.embedding(graph.index(0, 1, 2, 3), weight)
    (hidden @ weight.t()).backward(graph.plain())


def picked(name: str) -> Callable[[Graph], None]:
    def run(graph: Graph) -> None:
        getattr(torch, name)(graph.leaf(), dim=1)[0].sum().backward()

    run.__name__ = name
    return run


FORMULAS: list[Callable[[Graph], None]] = [
    lambda graph: graph.leaf().gather(1, graph.index(0, 1, 2, 3)[:, None]).sum().backward(),
    lambda graph: graph.leaf()[graph.index(0, 1, 1)].sum().backward(),
    lambda graph: graph.leaf().index_select(0, graph.index(0, 1, 1)).sum().backward(),
    lambda graph: graph.leaf().take(graph.index(0, 1, 1)).sum().backward(),
    lambda graph: graph.leaf().topk(2)[0].sum().backward(),
    lambda graph: graph.leaf().kthvalue(2)[0].sum().backward(),
    lambda graph: graph.leaf().clamp(graph.plain(4), graph.plain(4) + 1).sum().backward(),
    lambda graph: torch.take_along_dim(graph.leaf(), graph.index(0, 1, 2, 3)[:, None], 1).sum().backward(),
]
GRAPHS = [
    used_twice,
    two_branches,
    residual_with_a_gradient_that_is_held,
    residual,
    residual_of_a_sum,
    three_branches,
    gradient_kept_by_a_hook,
    hook_that_adds,
    retained_gradient,
    transposed,
    views,
    chunks,
    selections,
    second_derivative,
    twice_into_the_same_gradient,
    tied_embedding,
    *map(picked, ("max", "min", "median", "mode", "sort", "cummax")),
    *FORMULAS,
]
NAMES = [graph.__name__ for graph in GRAPHS[: -len(FORMULAS)]] + [
    "gather",
    "index",
    "index_select",
    "take",
    "topk",
    "kthvalue",
    "clamp",
    "take_along_dim",
]


def run_for_real(graph: Callable[[Graph], None]) -> Counter[str]:
    """Operators of a run on the CPU, less those that others call below them."""
    with torch.autograd.profiler.profile() as profile:
        graph(Graph("cpu"))
    names: Counter[str] = Counter()
    for event in profile.function_events:
        name = event.name.removeprefix("aten::").replace("_index_put_impl_", "index_put_")
        if name in COUNTED and not any(above.removeprefix("aten::") in COUNTED for above in ancestors(event)):
            names[name] += 1
    return names


def ancestors(event: Any) -> Iterator[str]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event.name


@pytest.fixture
def run_on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Graph], None]], Counter[str]]:
    names: Counter[str] = Counter()
    charge = VirtualMode._charge

    def count(mode: VirtualMode, func: Any, *rest: Any) -> None:
        name = str(func._overloadpacket).removeprefix("aten.")
        if name in COUNTED:
            names[name] += 1
        charge(mode, func, *rest)

    monkeypatch.setattr(VirtualMode, "_charge", count)

    def run(graph: Callable[[Graph], None]) -> Counter[str]:
        with vgpu.virtual_gpu("rtx4090"):
            names.clear()
            graph(Graph("vgpu"))
            return Counter(names)

    return run


@pytest.mark.parametrize("graph", GRAPHS, ids=NAMES)
def test_as_without_a_mode(graph: Callable[[Graph], None], run_on_card: Callable[..., Counter[str]]) -> None:
    assert run_on_card(graph) == run_for_real(graph)


def test_two_gradients_are_summed_in_one_of_them(card: vgpu.Device) -> None:
    weight = torch.rand(512, 512, device="vgpu", requires_grad=True)
    gradient = torch.rand(512, 512, device="vgpu")
    (weight @ weight).backward(gradient)
    weight.grad = None
    before = torch.vgpu.memory_allocated()
    torch.vgpu.reset_peak_memory_stats()
    (weight @ weight).backward(gradient)
    assert torch.vgpu.max_memory_allocated() - before == 3 * 512 * 512 * 4  # the product and two gradients
    assert torch.vgpu.memory_allocated() - before == 512 * 512 * 4


def test_the_gradient_of_a_transposed_weight_is_not_written_to(card: vgpu.Device) -> None:
    """A tied output head: its gradient is a view of another tensor, so the sum is a third copy, as on any device."""
    weight = torch.rand(1024, 256, device="vgpu", requires_grad=True)
    tokens = torch.zeros(8, dtype=torch.long, device="vgpu")
    before = torch.vgpu.memory_allocated() + 2 * 8_519_680
    (F.embedding(tokens, weight) @ weight.t()).sum().backward()
    assert 3 * 1024 * 256 * 4 < torch.vgpu.max_memory_allocated() - before < 3.1 * 1024 * 256 * 4


def test_gathered_log_probabilities_need_one_gradient(card: vgpu.Device) -> None:
    logits = torch.rand(64, 4096, device="vgpu", requires_grad=True)
    loss = logits.gather(1, torch.zeros(64, 1, dtype=torch.long, device="vgpu")).sum()
    before = torch.vgpu.memory_allocated()
    torch.vgpu.reset_peak_memory_stats()
    loss.backward()
    assert torch.vgpu.max_memory_allocated() - before < 1.1 * 64 * 4096 * 4


def test_the_mask_of_plain_attention_is_added_in_place(card: vgpu.Device) -> None:
    query = torch.rand(1, 2, 8, 8, device="vgpu", requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(query, query, query, attn_mask=torch.zeros(8, 8, device="vgpu"))
    assert not card.adds_in_place
    out.sum().backward()
    assert query.grad is not None
    assert query.grad.shape == query.shape


def test_logits_loss_works_in_one_buffer(card: vgpu.Device) -> None:
    x = torch.rand(1024, 1024, device="vgpu", requires_grad=True)
    loss = F.binary_cross_entropy_with_logits(x, torch.rand(1024, 1024, device="vgpu"))
    before = torch.vgpu.memory_allocated()
    torch.vgpu.reset_peak_memory_stats()
    loss.backward()
    assert torch.vgpu.max_memory_allocated() - before < 2.5 * 1024 * 1024 * 4
