"""Who made each allocation: the module that ran, the operator that asked, and the user's source line.

An operator of a backward belongs to the module and the line whose forward made its node in the graph; where the user's
own Python code runs within the backward, to that line. Nodes carry the number in which they were made, and every
operator of the forward notes how far that number has come, so a binary search finds the line again.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bench.vgpu.device import Device
from bench.vgpu.memory import Held

OUTSIDE = "(outside modules)"
UNKNOWN = "(not recorded)"

_NODES = 2**20  # places of graph nodes that are kept; of more, the older half is forgotten
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
_nodes_made = torch._C._autograd._get_sequence_nr


class Allocation(NamedTuple):
    """One allocation that lives, and who made it.

    Attributes:
        size_bytes: Of its block.
        category: One of `bench.vgpu.memory.CATEGORIES`.
        module: Qualified name of the module that ran; of a parameter or its optimizer state, the one that owns it.
        operator: As "aten.mm.default".
        line: "path/to/file.py:line in function"; with "(backward)" where the line's backward made it.
        text: That source line; empty where the file cannot be read.
    """

    size_bytes: int
    category: str
    module: str
    operator: str
    line: str
    text: str


class Site(NamedTuple):
    """A module that runs, and an instruction of the user's code in it."""

    module: str
    code: CodeType | None
    instruction: int


_NOWHERE = Site(OUTSIDE, None, -1)


class Origin(NamedTuple):
    """What is noted at an allocation."""

    operator: Any
    site: Site
    backward: bool


class Attribution:
    """Notes the origin of every allocation while `attributing` lasts."""

    def __init__(self, device: Device) -> None:
        self._memory = device.memory
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._running: list[tuple[str, int]] = []
        self._paths: dict[CodeType, str] = {}
        self._nodes: list[int] = []
        self._sites: list[Site] = []
        self._node = self._first_node = _nodes_made()
        self._last = _NOWHERE

    def name(self, module: nn.Module, name: str) -> None:
        """Give a module and all below it their qualified names; without, a model that is called goes by its class."""
        self._roots.insert(0, (name, weakref.ref(module)))
        self._names.update((child, f"{name}.{path}" if path else name) for path, child in module.named_modules())

    def passed(self) -> None:
        """Note where we are if the operator that runs now has made a node of the graph."""
        node = _nodes_made()
        if node == self._node:
            return
        self._node = node
        if len(self._nodes) >= _NODES:
            self._first_node = self._nodes[_NODES // 2]
            del self._nodes[: _NODES // 2], self._sites[: _NODES // 2]
        frame = self._user_frame(None)
        self._nodes.append(node)
        self._sites.append(Site(self._module(), frame.f_code, frame.f_lasti) if frame is not None else _NOWHERE)

    def note(self, held: Held) -> None:
        """Note who makes an allocation."""
        task = _graph_task()
        frame = self._user_frame(None if task == -1 else _ENGINE)
        runs = task == -1 or (self._running and self._running[-1][1] == task)  # in a backward: recomputation
        site = _NOWHERE if runs and frame is not None else self._site_of_node()
        module = self._module() if runs else site.module
        if frame is not None:
            site = Site(module, frame.f_code, frame.f_lasti)
        held.origin = Origin(self._memory.operator, site._replace(module=module), frame is None)

    def at_peak(self) -> list[Allocation]:
        """What lived at the peak since the last `reset_peak_memory_stats`, largest first; adds up to the peak."""
        return self.describe(self._memory.at_peak())

    def at_failure(self) -> list[Allocation]:
        """What lived when the card last ran out of memory, largest first; adds up to what was allocated then."""
        return self.describe(self._memory.at_failure())

    def describe(self, holds: Iterable[Held]) -> list[Allocation]:
        """Allocations with what is known of each, largest first."""
        owners = self.owners()
        found = [self.described(held, owners.get(held)) for held in holds]
        return sorted(found, key=lambda allocation: (-allocation.size_bytes, *allocation[1:]))

    def described(self, held: Held, owner: tuple[str, str] | None) -> Allocation:
        """One allocation; `owner` is what `owners` has for it."""
        origin: Origin | None = held.origin
        category = self._memory.category_of(held)
        if owner is not None and held.category in (None, "temporaries"):
            category = owner[0]
        if origin is None:
            return Allocation(held.block.size_bytes, category, owner[1] if owner else UNKNOWN, UNKNOWN, UNKNOWN, "")
        module = owner[1] if owner is not None and category != "gradients" else origin.site.module
        line, text = self._line(origin.site)
        if origin.backward:
            line += " (backward)"
        return Allocation(held.block.size_bytes, category, module, str(origin.operator), line, text)

    def owners(self) -> dict[Held, tuple[str, str]]:
        """Category and module of what modules and optimizers hold now."""
        owners: dict[Held, tuple[str, str]] = {}
        modules: dict[Tensor, str] = {}

        def own(tensor: Any, category: str, module: str) -> None:
            if isinstance(tensor, Tensor):
                held = self._memory.held(getattr(tensor, "_local_tensor", tensor))
                if held is not None:
                    owners.setdefault(held, (category, module))

        for root, reference in self._roots:
            module = reference()
            if module is None:
                continue
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                path = ".".join([root, *name.split(".")[:-1]])
                modules.setdefault(tensor, path)
                own(tensor, "parameters", path)
                own(tensor.grad, "gradients", path)
        for optimizer in self._optimizers:
            for parameter, states in optimizer.state.items():
                for state in states.values():
                    own(state, "optimizer", modules.get(parameter, OUTSIDE))
        return owners

    def _module(self) -> str:
        """The innermost module that runs."""
        return self._running[-1][0] if self._running else OUTSIDE

    def _user_frame(self, end: CodeType | None) -> FrameType | None:
        """The innermost frame outside torch and this package; None: there is none within the call of `end`."""
        frame: FrameType | None = sys._getframe(2)
        paths = self._paths
        while frame is not None:
            code = frame.f_code
            if code is end:
                return None
            path = paths.get(code)
            if path is None:
                path = paths[code] = _path(frame)
            if path:
                return frame
            frame = frame.f_back
        return None

    def _site_of_node(self) -> Site:
        """Where the node was made whose backward runs now; of one without a number, where its predecessor was."""
        node = _current_node()
        number = node._sequence_nr() if node is not None else -1
        index = bisect_right(self._nodes, number)
        if number >= self._first_node and index < len(self._nodes):
            self._last = self._sites[index]
        return self._last

    def _line(self, site: Site) -> tuple[str, str]:
        code = site.code
        if code is None:
            return UNKNOWN, ""
        number = line_number(code, site.instruction)
        return f"{self._paths[code]}:{number} in {code.co_name}", linecache.getline(code.co_filename, number).strip()

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self._names.get(module)
        if path is None:
            kind = type(module).__name__
            path = f"{self._running[-1][0]}.{kind}" if self._running else kind
            self._roots.append((path, weakref.ref(module)))
            for below, child in module.named_modules():
                self._names.setdefault(child, f"{path}.{below}" if below else path)
        self._running.append((path, _graph_task()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)


@contextmanager
def attributing(device: Device) -> Iterator[Attribution]:
    """Note the origin of every allocation on `device`; only what is made meanwhile can be told later."""
    attribution = Attribution(device)
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(attribution._enter).remove)
        stack.callback(register_module_forward_hook(attribution._leave, always_call=True).remove)
        stack.callback(register_optimizer_step_post_hook(attribution._stepped).remove)
        device.memory.watchers.append(attribution.note)
        stack.callback(device.memory.watchers.remove, attribution.note)
        device.attribution = attribution
        try:
            yield attribution
        finally:
            device.attribution = None


def line_number(code: CodeType, instruction: int) -> int:
    """The source line of an instruction, as a frame's `f_lasti` gives it."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return next(lines, code.co_firstlineno)


def _path(frame: FrameType) -> str:
    """`path/to/module.py` of a frame; empty for one of torch or of this package."""
    name = str(frame.f_globals.get("__name__", ""))
    if name.startswith(("torch.", "bench.vgpu", "contextlib")):
        return ""
    return frame.f_code.co_filename.rpartition("/")[2] if name == "__main__" else name.replace(".", "/") + ".py"
