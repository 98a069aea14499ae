"""What autograd does in place on a card, but not under a dispatch mode.

torch keeps out of the way of dispatch modes by leaving tensors as they are (`at::isTensorSubclassLike`,
aten/src/ATen/TensorSubclassLikeUtils.h, torch 2.13): it adds gradients up in new tensors, and scatters into copies. On
a card none of these copies exists. Here such an operator is run as the in-place one that the card would run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward

aten = torch.ops.aten

_ENGINE = _engine_run_backward.__code__
_graph_task = torch._C._current_graph_task_id

# References to a tensor, and to its storage, that only the caller holds, as a dispatch mode counts them: the caller's
# own, and those of the tensor's Python object and of the call.
_ALONE = 4
_STORAGE_ALONE = 2

_SELECTIONS = frozenset(
    f"{name}Backward{number}"
    for name in ("Max", "Min", "Median", "Nanmedian", "Mode", "Sort", "Topk", "Kthvalue")
    for number in (0, 1)
)
_LOGITS_LOSS = frozenset({"BinaryCrossEntropyWithLogitsBackward0"})

# Operator -> what the card runs, and the nodes whose formulas (torch/csrc/autograd/FunctionsManual.cpp,
# aten/src/ATen/native/TensorAdvancedIndexing.cpp and Loss.cpp, torch 2.13) do so.
_FORMULAS: dict[OpOverload, tuple[OpOverload, frozenset[str]]] = {
    aten.index_put.default: (aten.index_put_.default, frozenset({"IndexBackward0"})),
    aten._unsafe_index_put.default: (aten.index_put_.default, frozenset({"IndexBackward0"})),
    aten.put.default: (aten.put_.default, frozenset({"TakeBackward0"})),
    aten.scatter_add.default: (
        aten.scatter_add_.default,
        frozenset({"GatherBackward0", "CummaxBackward0", "CumminBackward0"}),
    ),
    aten.index_add.default: (aten.index_add_.default, frozenset({"IndexSelectBackward0"})),
    aten.scatter.src: (aten.scatter_.src, _SELECTIONS),
    aten.logical_and.default: (aten.logical_and_.default, frozenset({"ClampBackward0", "ClampBackward1"})),
    aten.sub.Tensor: (aten.sub_.Tensor, _LOGITS_LOSS),
    aten.mul.Tensor: (aten.mul_.Tensor, _LOGITS_LOSS),
}

CANDIDATES = frozenset({aten.add.Tensor, *_FORMULAS})
"""Operators that `as_on_card` may change."""


def as_on_card(func: OpOverload, args: Sequence[Any], adds_in_place: bool) -> OpOverload:
    """The operator that a card would run where the engine has called `func`, one of CANDIDATES, under a mode."""
    if adds_in_place and func is aten.add.Tensor:
        return aten.add_.Tensor
    if _graph_task() == -1 or torch.is_grad_enabled() or sys._getframe(2).f_code is not _ENGINE:
        return func
    if func is aten.add.Tensor:
        return aten.add_.Tensor if _held_alone(args[0]) else func
    inplace, nodes = _FORMULAS[func]
    node = torch._C._current_autograd_node()
    if node is None or node.name() not in nodes:
        return func
    return inplace if nodes is not _LOGITS_LOSS or _held_alone(args[0]) else func


def _held_alone(tensor: Any) -> bool:
    """Whether its caller may write to a tensor (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace)."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor._use_count() == _ALONE  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == _STORAGE_ALONE
        and (tensor.is_contiguous() or is_non_overlapping_and_dense_or_false(tensor))
    )
