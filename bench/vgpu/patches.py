"""Changes to torch, for as long as a virtual GPU is enabled, where fake tensors would show."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import _foreach_supported_types as _optimizer_kinds
from torch.utils import _foreach_utils


def _swap(first: Tensor, second: Tensor) -> None:
    """Swap two tensors as torch.utils.swap_tensors does, but allow weak references to them.

    Fake tensors are known by weak reference to the converter that made them; nothing there looks into them.
    """
    names = {"__class__", "__dict__"} | set(copyreg._slotnames(type(first)))  # type: ignore[attr-defined]
    for name in names:
        if hasattr(first, name) and hasattr(second, name):
            kept = getattr(first, name)
            setattr(first, name, getattr(second, name))
            setattr(second, name, kept)
    torch._C._swap_tensor_impl(first, second)


def _deepcopy(tensor: FakeTensor, memo: dict[int, object]) -> Tensor:
    """Copy a fake tensor as Tensor.__deepcopy__ copies one: new storage, same grad and flags, attributes kept."""
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[return-value]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment.")
    with torch.no_grad():
        copy: Tensor = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    else:
        copy.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copy.grad = tensor.grad.__deepcopy__(memo)
    memo[id(tensor)] = copy
    return copy


def _apply(
    module: torch.nn.Module, apply: Callable[..., torch.nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Module._apply, which sets a parameter's data where CPU tensors become CUDA's: a swap does the same for fakes.

    Parameters on meta get no swap: they become new ones, as on their way to CUDA, and ties between modules are lost.
    """
    outer = torch.__future__.get_swap_module_params_on_conversion()
    swap = any(parameter is not None and not parameter.is_meta for parameter in module._parameters.values())
    torch.__future__.set_swap_module_params_on_conversion(outer or swap)
    try:
        return apply(module, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(outer)


class _NotFake:
    """What libraries find when they ask torch whether a tensor is fake: transformers takes one for being traced."""


@contextmanager
def patched_torch(uncharged: AbstractContextManager[None]) -> Iterator[None]:
    """Change torch for as long as the context lasts.

    `module.to()` swaps fake parameters. Optimizers take fake tensors for foreach, as they take CUDA's. What DTensor
    runs only to learn the shape of a global result, it runs in `uncharged`.
    """
    lock = ShardingPropagator._fake_mode_lock
    swap: Any = torch.utils.swap_tensors
    apply = torch.nn.Module._apply
    kinds = (_foreach_utils._foreach_supported_types, _optimizer_kinds)

    def swap_fakes(first: Tensor, second: Tensor) -> None:
        if not (isinstance(first, FakeTensor) or isinstance(second, FakeTensor)):
            swap(first, second)
            return
        _swap(first, second)
        if sys._getframe(1).f_code is apply.__code__:
            with uncharged:  # setting data would free the old storage here, not with the next parameter
                second.data = second.new_empty(0)

    torch.utils.swap_tensors = swap_fakes
    torch.nn.Module._apply = partialmethod(_apply, apply)  # type: ignore[method-assign, assignment]
    ShardingPropagator._fake_mode_lock = uncharged  # type: ignore[assignment]
    torch._subclasses.FakeTensor = _NotFake  # type: ignore[misc, assignment]
    for each in kinds:
        each.append(FakeTensor)
    FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap
        torch.nn.Module._apply = apply  # type: ignore[method-assign]
        ShardingPropagator._fake_mode_lock = lock
        torch._subclasses.FakeTensor = FakeTensor  # type: ignore[misc]
        del FakeTensor.__deepcopy__
        for each in kinds:
            each.remove(FakeTensor)
