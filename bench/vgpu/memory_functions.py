"""`torch.vgpu.memory`: what `torch.cuda.memory` offers, with its recording of history.

Arguments and what they mean follow torch/cuda/memory.py and torch/csrc/cuda/memory_snapshot.cpp, torch 2.13.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch

from bench.vgpu.attribution import attributing
from bench.vgpu.device import current
from bench.vgpu.history import History

_ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
)
_PROTOCOL = 4  # the latest that the viewer at pytorch.org/memory_viz reads


class MemoryFunctions:
    """The functions of `torch.cuda.memory` for the enabled virtual card."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(torch.get_device_module("vgpu"), name)

    def _record_memory_history(self, enabled: str | bool | None = "all", *args: Any, **kwargs: Any) -> None:
        """Start or stop to record; a truth value in place of a word has the older arguments of that form.

        Raises:
            RuntimeError: A word that torch does not know.
        """
        if isinstance(enabled, bool):
            self._record_legacy(enabled, *args, **kwargs)
        else:
            self._record(enabled, *args, **kwargs)

    def _record(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        device: Any = None,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Sequence[str] | None = None,
    ) -> None:
        """Stacks are those of Python: the virtual card has none of C++."""
        _check("enabled", enabled, (None, "state", "all"))
        _check("context", context, (None, "state", "alloc", "all"))
        _check("stacks", stacks, ("python", "all"))
        for action in skip_actions or ():
            _check("skip_actions", action, _ACTIONS)
        state = current()
        before = state.history
        state.recordings.close()
        if enabled is None:
            return
        history = History(state, enabled == "all", context, min(max_entries, sys.maxsize), skip_actions or ())
        if before is not None and not clear_history:
            history.carry_on(before)
        if context is not None and state.attribution is None:
            state.recordings.enter_context(attributing(state))
        state.recordings.enter_context(history)

    def _record_legacy(
        self,
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        device: Any = None,
        record_context_cpp: bool = False,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Sequence[str] | None = None,
    ) -> None:
        context = "alloc" if trace_alloc_record_context else "state" if record_context else None
        self._record(
            "all" if enabled else None,
            context,
            max_entries=trace_alloc_max_entries,
            clear_history=clear_history,
            skip_actions=skip_actions,
        )

    def _snapshot(self, device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
        """Segments, blocks and the trace, as `torch.cuda.memory._snapshot` gives them."""
        state = current()
        history = state.history or History(state, False, None, 0, ())
        return history.snapshot()

    def _dump_snapshot(
        self, filename: str | PathLike[str] = "dump_snapshot.pickle", augment_with_fx_traces: bool = False
    ) -> None:
        """Write a snapshot for pytorch.org/memory_viz, `torch.cuda._memory_viz` and `oombench replay`."""
        snapshot = self._snapshot()
        with open(filename, "wb") as file:
            pickle.dump(snapshot, file, protocol=_PROTOCOL)


def _check(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise RuntimeError(f"_record_memory_history: expected {name} to be one of {known}, not {value!r}")
