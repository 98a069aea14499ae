"""Operators that the CPU build of PyTorch cannot run for the virtual GPU: kernels and shape rules, registered once.

`install()` gives the device what lies below the dispatch modes (`torch.tensor(..., device=)` builds there), CUDA's
choice of attention, and shape rules for CUDA operators that come without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import meta_table
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.vgpu import convolution, grouped, recurrent
from bench.vgpu.attention import attention
from bench.vgpu.realness import LIMIT

aten = torch.ops.aten

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register everything here; a second call does nothing."""
    if _libraries:
        return
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
    kernels.impl("empty.memory_format", _empty, "PrivateUse1")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    kernels.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    recurrent.install(kernels)
    grouped.install()
    convolution.install()
    kernels.impl("softmax.int", _softmax, "AutogradPrivateUse1")
    kernels.impl("log_softmax.int", _log_softmax, "AutogradPrivateUse1")
    kernels.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    kernels.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    register_op_impl(aten._thnn_fused_lstm_cell.default)(_lstm_cell)
    register_op_impl(aten.binary_cross_entropy.default)(_cross_entropy)
    meta_table[aten.binary_cross_entropy.default] = _cross_entropy  # or fake tensors take it apart before they ask
    kernels.impl("_sample_dirichlet", _like_first, "Meta")
    kernels.impl("_dirichlet_grad", _like_first, "Meta")
    kernels.impl("binomial", _like_first, "Meta")
    for name in (
        "_fused_sgd_",
        "_fused_sgd_.tensor_lr",
        "_fused_adagrad_",
        "_fused_adagrad_.tensor_lr",
        "_fused_adam_.tensor_lr",
        "_fused_adamw_.tensor_lr",
    ):
        kernels.impl(name, _in_place, "Meta")
    for name in ("silu_backward", "mish_backward", "_fused_rms_norm"):
        kernels.impl(name, _one_kernel, "PrivateUse1")
    _libraries.append(kernels)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> Tensor:
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> Tensor:
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy below the modes; the target keeps small values beside it, as it has no memory for them."""
    if source.device.type == "cpu" and source.numel() <= LIMIT:
        with torch._C._DisableTorchDispatch():
            target._vgpu_values = source.detach().clone()  # type: ignore[attr-defined]
    return target


def _in_place(*args: Any, **kwargs: Any) -> None:
    """Fused optimizers write into their arguments and return nothing."""


def _like_first(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draws of a distribution are shaped as its first parameter."""
    return torch.empty_like(first)


def _softmax(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _maybe_widened(aten._softmax.default, values, dim, dtype)


def _log_softmax(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _maybe_widened(aten._log_softmax.default, values, dim, dtype)


def _maybe_widened(func: Any, values: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    """CUDA's kernel itself goes from float16 to float32; any other type is converted first.

    aten/src/ATen/native/SoftMax.cpp, softmax and log_softmax (torch 2.13).
    """
    widens = values.dtype is torch.float16 and dtype is torch.float32
    out: Tensor = func(values if widens or dtype is None else values.to(dtype), dim, widens)
    return out


def _one_kernel(*args: Any, **kwargs: Any) -> Any:
    """CUDA has a kernel where other devices run a formula; with one registered, the operator reaches the mode whole."""
    raise NotImplementedError("the virtual GPU has no data")


def _lstm_cell(mode: FakeTensorMode, func: Any, gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Any) -> Any:
    """New states and the workspace of four gates, without torch's own rule, which fails where there is no bias.

    aten/src/ATen/native/cuda/RNN.cu, torch 2.13.
    """
    states = (torch.empty_like(cx, memory_format=torch.contiguous_format) for _ in range(2))
    return (*states, torch.empty_like(gates, memory_format=torch.contiguous_format))


def _cross_entropy(
    mode: FakeTensorMode, func: Any, values: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """A reduced loss stays in the storage of the losses by element: it is copied over their first.

    aten/src/ATen/native/cuda/Loss.cu, binary_cross_entropy_out_cuda, torch 2.13; native/Loss.cpp does the same.
    """
    loss = torch.empty_like(values)
    return loss.as_strided((), ()) if reduction else loss


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New hidden state and the workspace of five gates (aten/src/ATen/native/cuda/RNN.cu, torch 2.13)."""
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty((hx.size(0), 5 * hx.size(1)))


def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of both gate inputs, the state and the biases (aten/src/ATen/native/cuda/RNN.cu, torch 2.13)."""
    rows, hidden = workspace.size(0), workspace.size(1) // 5
    gates = workspace.new_empty((rows, 3 * hidden))
    bias = gates.new_empty((3 * hidden,)) if has_bias else None
    return (
        gates,
        torch.empty_like(gates),
        torch.empty_like(grad_hy, memory_format=torch.contiguous_format),
        bias,
        torch.empty_like(bias) if bias is not None else None,
    )
