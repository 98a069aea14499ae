"""Live tensor bytes of a training run, counted twice: on the virtual card, and by torch's MemTracker on the CPU.

Both run the same Python. What the card's rules add (temporaries, workspaces) and what autograd writes in place there
can be left out, so that the two counts differ only where a CUDA operator keeps other tensors than the CPU's. Each such
difference is a `Term`: a name and a formula in bytes.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

import bench.vgpu as vgpu
from bench.vgpu import mode

STEPS = 2
WORKSPACE_BYTES = 8_519_680

PHASES = ("forward", "backward", "clip", "step", "clear")
MOMENTS = tuple(f"{phase}, {when}" for phase in PHASES for when in ("peak", "after"))

GRAPH = frozenset({"forward, peak", "forward, after", "backward, peak"})
"""Where what a forward keeps for its backward counts, as long as the backward peaks before the graph is gone."""

STEPPED = frozenset(moment for moment in MOMENTS if moment.startswith(("step", "clear")))


class Count(NamedTuple):
    """Live bytes at one moment of one step."""

    step: int
    moment: str
    live_bytes: int


class Term(NamedTuple):
    """What the card holds more than the CPU, and when.

    Attributes:
        name: The rule that makes the difference.
        card_bytes: Of the card, negative where the CPU holds more.
        moments: Where it counts, of MOMENTS.
        first_step: The step from which on it does.
    """

    name: str
    card_bytes: int
    moments: frozenset[str] = GRAPH
    first_step: int = 0


@dataclass
class Family:
    """A small training run.

    Attributes:
        model: Makes the network.
        batch: Makes the inputs on a device.
        loss: The loss of a network and its inputs.
        optimizer: Makes the optimizers of a network.
        accumulation: Micro-batches a step.
        autocast: Whether the forward runs in bfloat16.
        fake: Whether the CPU has fake tensors only: quick, but a program that asks for values fails.
        on_paper: Puts a written model of a CUDA operator in its place on the CPU.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    optimizer: Callable[[nn.Module], list[torch.optim.Optimizer]]
    accumulation: int = 1
    autocast: bool = False
    fake: bool = False
    on_paper: Callable[[pytest.MonkeyPatch], None] | None = None


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), foreach=True)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)]


def host_counters(model: nn.Module) -> list[Term]:
    """Adam counts each parameter's steps in a float32 on the host, where the CPU's count has it with the others."""
    counters_bytes = -4 * sum(parameter.requires_grad for parameter in model.parameters())
    name = "steps are counted on the host"
    return [
        Term(name, counters_bytes, STEPPED),
        Term(name, counters_bytes, frozenset(MOMENTS) - STEPPED, first_step=1),
    ]


def agree(family: Family, *terms: Term) -> vgpu.Device:
    """Assert that both counts agree at every moment, but for `terms`; give the card that ran under all its rules.

    Rules for temporaries and for what is written in place leave nothing behind: with them there live as many bytes at
    the end of each phase, and a cuBLAS workspace for each of the threads that have multiplied.
    """
    if family.optimizer is adamw:
        terms = (*terms, *host_counters(family.model()))
    cpu = on_cpu(family)
    with without_rules():
        bare, _ = on_card(family)
    expected = [_with_terms(count, terms) for count in cpu]
    unexplained = [(*right, left.live_bytes - right.live_bytes) for left, right in zip(bare, expected, strict=True)]
    assert [each for each in unexplained if each[-1]] == []
    full, card = on_card(family)
    for plain, ruled in zip(bare, full, strict=True):
        if plain.moment.endswith("after"):
            threads = 1 if (plain.step, plain.moment) == (0, "forward, after") and family.accumulation == 1 else 2
            assert ruled.live_bytes == plain.live_bytes + threads * WORKSPACE_BYTES, plain
    return card


def _with_terms(count: Count, terms: Sequence[Term]) -> Count:
    there = (term for term in terms if count.moment in term.moments and count.step >= term.first_step)
    return count._replace(live_bytes=count.live_bytes + sum(term.card_bytes for term in there))


def train(family: Family, device: torch.device, phase: Callable[[int, str], None]) -> None:
    """Train for STEPS steps, as a Trainer does, and tell the end of each phase."""
    model = family.model()
    if device.type != "cpu":
        model.to(device)
    batch = family.batch(device)
    optimizers = family.optimizer(model)
    phase(-1, "made")
    for step in range(STEPS):
        for micro in range(family.accumulation):
            with torch.autocast(device.type, torch.bfloat16) if family.autocast else nullcontext():
                loss = family.loss(model, *batch)
            if micro == family.accumulation - 1:
                phase(step, "forward")
            (loss / family.accumulation).backward()
            del loss
            phase(step, "micro-batch")
        phase(step, "backward")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        phase(step, "clip")
        for optimizer in optimizers:
            optimizer.step()
        phase(step, "step")
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        phase(step, "clear")


class CudaCasts(TorchFunctionMode):
    """Under the CPU's autocast, what CUDA's takes in float32 and the CPU's does not.

    CUDA's lists: aten/src/ATen/autocast_mode.h, torch 2.13. A cross entropy asks for the logarithm in its own type
    (aten/src/ATen/native/LossNLL.cpp), so that only the loss is taken in float32.
    """

    FLOAT32 = frozenset({F.layer_norm, F.softmax, F.nll_loss, torch.pow, Tensor.pow, Tensor.__pow__})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu"):
            if func is F.cross_entropy:
                known = {name: kwargs[name] for name in ("ignore_index", "reduction") if name in kwargs}
                return F.nll_loss(args[0].log_softmax(1).float(), args[1], **known)
            if func in self.FLOAT32:
                args = tuple(map(_widened, args))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


class _NotFake:
    """What transformers finds when it asks whether a tensor is fake, as on the virtual card."""


def on_cpu(family: Family) -> list[Count]:
    """Peak and live bytes phase by phase, as MemTracker counts storages of fake tensors on the CPU."""
    counts: list[Count] = []
    tracker = MemTracker()
    device = torch.device("cpu")

    def phase(step: int, name: str) -> None:
        if name == "micro-batch":
            tracker.reset_mod_stats()
            return
        gc.collect(1)
        live_bytes = tracker.get_tracker_snapshot()[device]["Total"]
        if step >= 0:
            counts.append(Count(step, f"{name}, peak", tracker._peak_mem[device]))
            counts.append(Count(step, f"{name}, after", live_bytes))
        tracker._peak_mem[device] = live_bytes
        if name != "forward":
            tracker.reset_mod_stats()  # which it has to have of modules in a backward only

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(torch._subclasses, "FakeTensor", _NotFake)
        # MemTracker puts its hooks on frozen parameters, too, which take none.
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patch.setattr(Tensor, name, _hook_if_trained(getattr(Tensor, name)))
        warnings.filterwarnings("ignore", "Module is None", UserWarning)
        if family.on_paper is not None:
            family.on_paper(patch)
        with FakeTensorMode() if family.fake else nullcontext(), tracker, CudaCasts():
            train(family, device, phase)
    return counts


def _hook_if_trained(register: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, hook: register(tensor, hook) if tensor.requires_grad else RemovableHandle(OrderedDict())


@contextmanager
def without_rules() -> Iterator[None]:
    """The virtual card without temporaries, workspaces and in-place sums: tensors that a dispatch mode sees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mode, "TEMPORARIES", {})
        patch.setattr(mode, "CANDIDATES", frozenset())
        patch.setattr(mode, "cublas_workspace_bytes", lambda *args: 0)
        yield


def on_card(family: Family) -> tuple[list[Count], vgpu.Device]:
    """The same of a virtual RTX 4090, in bytes that tensors asked for; and the card."""
    counts: list[Count] = []

    def phase(step: int, name: str) -> None:
        if name == "micro-batch":
            return
        gc.collect(1)
        stats = torch.vgpu.memory_stats()
        if step >= 0:
            counts.append(Count(step, f"{name}, peak", stats["requested_bytes.all.peak"]))
            counts.append(Count(step, f"{name}, after", stats["requested_bytes.all.current"]))
        torch.vgpu.reset_peak_memory_stats()

    with vgpu.virtual_gpu("rtx4090") as card:
        train(family, torch.device("vgpu"), phase)
    return counts, card
