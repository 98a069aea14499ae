"""Memory that CUDA operators take inside and no tensor shows: one table, an entry per operator.

Each entry gives sizes in bytes, phase by phase: what lives at the same time is one phase. Files are named below
aten/src/ATen of torch 2.13. Scratch that is bounded by what a card runs at once is left out: the staging buffers of
large reductions (native/cuda/Reduce.cuh) and the tile states of cub's scans and selections, together below 1 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from bench.targets import Target
from bench.vgpu import attention_space, sorting
from bench.vgpu.known import known
from bench.vgpu.workspaces import cublaslt_workspace_bytes

aten = torch.ops.aten


class Call(NamedTuple):
    """An operator's arguments, and the card and release that run it."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Target
    release: tuple[int, int]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


Phases = Iterable[Sequence[int]]
Entry = Callable[[Call], Phases]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _accumulator_bytes(tensor: Tensor) -> int:
    """Bytes of an element in the type that sums of its type are taken in."""
    return max(4, tensor.dtype.itemsize)


def _contiguous(*positions: int) -> Entry:
    """An entry for kernels that first make these arguments contiguous."""

    def entry(call: Call) -> Phases:
        tensors = [call.args[position] for position in positions if len(call.args) > position]
        return ([_bytes(each) for each in tensors if isinstance(each, Tensor) and not each.is_contiguous()],)

    return entry


def _matrices(*positions: int) -> Entry:
    """Matrix products copy an operand whose rows and columns both have gaps.

    native/cuda/cuBlasCommonArgs.h, prepare_matrix_for_cublas; native/cuda/Blas.cpp, prepare_batch_matrix_for_cublas.
    """

    def entry(call: Call) -> Phases:
        return ([_bytes(call.args[position]) for position in positions if not _blas_layout(call.args[position])],)

    return entry


def _addmm(call: Call) -> Phases:
    """A product with a bias; before 2.12 cublasLt, which adds the bias itself, had a workspace of its own.

    native/cuda/Blas.cpp, addmm_out_cuda_impl: a bias vector, and more than one row and column of the second matrix. In
    2.9 to 2.11 the workspace is kept; here it is returned after each call.
    """
    bias, matrix = call.args[0], call.args[2]
    fused = bias.dim() == 1 and bias.is_contiguous() and min(matrix.shape) > 1
    (copies,) = _matrices(1, 2)(call)
    return ([*copies, cublaslt_workspace_bytes(call.release) * fused],)


def _blas_layout(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    return (column_stride == 1 and row_stride >= max(1, columns)) or (row_stride == 1 and column_stride >= max(1, rows))


def _of_size(*positions: int) -> Entry:
    """An entry for operators that hold these arguments' sizes once more."""
    return lambda call: ([_bytes(call.args[position]) for position in positions],)


def _reduced_loss(reduction: int) -> Entry:
    """Losses that are reduced are first formed element by element (native/BinaryOps.cpp, native/Loss.cpp)."""

    def entry(call: Call) -> Phases:
        return ([_bytes(call.args[0])],) if call.argument(reduction, "reduction", 1) else ()

    return entry


def _cross_entropy_with_logits(call: Call) -> Phases:
    """The log sigmoid and the loss by element (native/Loss.cpp, binary_cross_entropy_with_logits)."""
    size_bytes = _bytes(call.args[0])
    weighted = call.argument(3, "pos_weight") is not None
    return ([size_bytes, size_bytes * weighted, size_bytes * bool(call.argument(4, "reduction", 1))],)


def _embedding_backward(call: Call) -> Phases:
    gradient, indices, rows, _, by_frequency = call.args[:5]
    copy_bytes = 0 if gradient.is_contiguous() else _bytes(gradient)
    target = call.target
    phases = sorting.embedding_phases(indices, gradient, rows, by_frequency, target.multiprocessors, call.release)
    return [[copy_bytes, *phase] for phase in (phases or ((),))]


def _embedding_bag_backward(call: Call) -> Phases:
    """A sum or mean sorts; a maximum knows its rows (native/cuda/EmbeddingBag.cu)."""
    gradient, indices = call.args[:2]
    rows, by_frequency, kind = call.args[6:9]
    copy_bytes = 0 if gradient.is_contiguous() else _bytes(gradient)
    if kind == 2:
        return ([copy_bytes],)
    target = call.target
    phases = sorting.embedding_bag_phases(indices, gradient, rows, by_frequency, target.multiprocessors, call.release)
    return [[copy_bytes, *phase] for phase in (phases or ((),))]


def _unique_consecutive(call: Call) -> Phases:
    tensor, inverse = call.args[0], call.argument(1, "return_inverse", False)
    dim = call.argument(3, "dim")
    if dim is None:
        return sorting.unique_consecutive_phases(tensor, inverse)
    return sorting.unique_dim_phases(tensor, dim, False, inverse, call.argument(2, "return_counts", False))


def _unique_dim(call: Call) -> Phases:
    inverse, counts = call.argument(3, "return_inverse", False), call.argument(4, "return_counts", False)
    return sorting.unique_dim_phases(call.args[0], call.args[1], True, inverse, counts)


def _cudnn_rnn(call: Call) -> Phases:
    """The input step by step, where it lies sample by sample (native/cudnn/RNN.cpp); the workspace is not known."""
    return ([_step_by_step(call.args[0], call.args[10], call.args[14])],)


def _cudnn_rnn_backward(call: Call) -> Phases:
    """Zeros for gradients of states that there are not, copies; and all weights' gradient where biases are wanting.

    native/cudnn/RNN.cpp: _cudnn_rnn_backward, then _cudnn_rnn_backward_input and _cudnn_rnn_backward_weight.
    """
    source, _, stride, buffer, hx, cx, out, grad_out, grad_hy, grad_cy = call.args[:10]
    if grad_out is None and grad_hy is None and grad_cy is None:
        return ()
    batch_first, batch_sizes = call.args[14], call.args[18]
    zeros = [_bytes(hx) * (grad_hy is None), _bytes(cx) * (grad_cy is None) if cx is not None else 0]
    zeros.append(_bytes(out) if grad_out is None else 0)
    copy_bytes = _step_by_step(source, batch_first, batch_sizes)
    grad_bytes = 0 if grad_out is None else _step_by_step(grad_out, batch_first, batch_sizes)
    unbiased = _bytes(buffer) if call.args[-1][3] and stride < 4 else 0
    return ([*zeros, copy_bytes, grad_bytes], [*zeros, copy_bytes, unbiased])


def _step_by_step(tensor: Tensor, batch_first: bool, batch_sizes: Sequence[int]) -> int:
    """Bytes of a copy that lies step by step; 0 where the tensor does."""
    steps = tensor.transpose(0, 1) if batch_first and not batch_sizes else tensor
    return 0 if steps.is_contiguous() else _bytes(tensor)


def _mask_count(index: Tensor) -> int:
    values = known(index)
    if values is None:
        return index.numel()
    with torch._C._DisableTorchDispatch():
        return int(values.count_nonzero())


def _index_count(indices: Sequence[Tensor | None]) -> int:
    """Indices of an indexing expression: as many as its index tensors broadcast to, or its masks pick."""
    counts = [
        _mask_count(index) if index.dtype in (torch.bool, torch.uint8) else index.numel()
        for index in indices
        if index is not None
    ]
    return max(counts, default=0)


def _mask_positions(indices: Sequence[Tensor | None]) -> list[int]:
    """Masks become positions (native/IndexingUtils.h, expandTensors): int64, one for every dimension of the mask."""
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return [_mask_count(mask) * mask.dim() * sorting.LONG for mask in masks]


def _index_put(call: Call) -> Phases:
    positions = _mask_positions(call.args[1])
    if not call.argument(3, "accumulate", False):
        return (positions,)
    tensor, indices, values = call.args[:3]
    indexed = sum(index.dim() if index.dtype is torch.bool else 1 for index in indices if index is not None)
    count = _index_count(indices)
    elements = count * prod(tensor.shape[indexed:])
    copied = values.numel() < elements or not values.is_contiguous()
    phases = sorting.index_put_phases(count, elements * values.dtype.itemsize * copied)
    return [[*positions, *phase] for phase in phases]


def _sort(call: Call) -> Phases:
    return sorting.sort_phases(call.args[0], call.argument(1, "dim", -1))


def _topk(call: Call) -> Phases:
    tensor, k = call.args[:2]
    copy_bytes = 0 if tensor.is_contiguous() else _bytes(tensor)
    dim, target = call.argument(2, "dim", -1), call.target
    phases = sorting.topk_phases(tensor, k, dim, target.multiprocessors, target.capability)
    return [[copy_bytes, *phase] for phase in (phases or [[]])]


def _multinomial(call: Call) -> Phases:
    """Weights over exponential draws (native/Distributions.cpp), or the normed weights and their sums.

    With replacement, more than one draw: native/cuda/MultinomialKernel.cu.
    """
    one = _bytes(call.args[0])
    several = call.argument(2, "replacement", False) and call.args[1] > 1
    return ([one, one, one] if several else [one],)


def _layer_norm_backward(call: Call) -> Phases:
    """Gradients of weight and bias are summed in two steps where rows are many and columns few.

    native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: more than 65,536 rows.
    """
    gradient, tensor, shape = call.args[:3]
    copies = [_bytes(each) for each in (gradient, tensor) if not each.is_contiguous()]
    columns = prod(shape)
    rows = tensor.numel() // max(1, columns)
    if rows <= 64 * 1024 or columns // 32 >= call.target.multiprocessors // 2:
        return (copies,)
    parts = min(32 * 1024 // ceil(columns / 32), ceil(rows / 32))
    return ([*copies, *[parts * columns * tensor.dtype.itemsize] * 2],)


def _group_norm(call: Call) -> Phases:
    """A scale and a shift for each sample and channel (native/cuda/group_norm_kernel.cu)."""
    tensor, weight, bias, samples, channels, inner = call.args[:6]
    if inner == 1 or (weight is None and bias is None):
        return ()
    return ([samples * channels * _accumulator_bytes(tensor)] * 2,)


def _group_norm_backward(call: Call) -> Phases:
    """Sums by sample and channel, and their combinations by group (native/cuda/group_norm_kernel.cu)."""
    _, tensor, _, _, weight, samples, channels, inner, groups = call.args[:9]
    item = _accumulator_bytes(tensor)
    by_channel, by_group = samples * channels * item, samples * groups * item
    third = by_channel if weight is not None and inner > 1 else 0
    return ([by_channel, by_channel, third, by_group, by_group],)


def _flash_forward(call: Call) -> Phases:
    query, key = call.args[:2]
    return (attention_space.flash_forward(query, key, call.argument(3, "dropout_p", 0.0), call.target.multiprocessors),)


def _flash_backward(call: Call) -> Phases:
    query, key = call.args[1:3]
    return (attention_space.flash_backward(query, key),)


def _efficient_backward(call: Call) -> Phases:
    query, key, value = call.args[1:4]
    return attention_space.efficient_backward(query, key, value, call.target.capability)


def _foreach_norm(call: Call) -> Phases:
    """One partial norm for every 65,536 elements, as many for each tensor as the longest needs.

    native/cuda/ForeachReduceOp.cu, foreach_tensor_norm_cuda.
    """
    tensors = call.args[0]
    chunks = max(ceil(tensor.numel() / 65536) for tensor in tensors)
    return ([len(tensors) * chunks * _accumulator_bytes(tensors[0])],)


def _nothing(call: Call) -> Phases:
    return ()


TEMPORARIES: Mapping[OpOverload, Entry] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._cudnn_rnn.default: _cudnn_rnn,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.index.Tensor: lambda call: (_mask_positions(call.args[1]),),
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.topk.default: _topk,
    aten._unique2.default: lambda call: sorting.unique_phases(call.args[0], call.argument(2, "return_inverse", False)),
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_dim,
    aten.multinomial.default: _multinomial,
    aten.cumsum.default: _contiguous(0),  # native/cuda/ScanUtils.cuh, scan_dim
    aten.cumprod.default: _contiguous(0),
    aten.nonzero.default: _nothing,  # native/cuda/Nonzero.cu: counts and tile states
    aten._softmax.default: _contiguous(0),  # native/cuda/SoftMax.cu
    aten._log_softmax.default: _contiguous(0),
    aten._softmax_backward_data.default: _contiguous(0, 1),
    aten._log_softmax_backward_data.default: _contiguous(0, 1),
    aten.nll_loss_forward.default: _contiguous(0),  # native/cuda/NLLLoss.cu
    aten.native_layer_norm.default: _contiguous(0),  # native/cuda/layer_norm_kernel.cu
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.mse_loss.default: _reduced_loss(2),
    aten.smooth_l1_loss.default: _reduced_loss(2),
    aten.huber_loss.default: _reduced_loss(2),
    aten.binary_cross_entropy_with_logits.default: _cross_entropy_with_logits,
    # native/cuda/Loss.cu: the sum; the losses by element stay in the result's storage (operators.py)
    aten.binary_cross_entropy.default: lambda call: (
        [call.args[0].dtype.itemsize * bool(call.argument(3, "reduction", 1))],
    ),
    aten.binary_cross_entropy_backward.default: _nothing,
    aten.logsumexp.default: _of_size(0),  # native/ReduceOps.cpp: exp(values - maximum)
    aten.mm.default: _matrices(0, 1),
    aten.addmm.default: _addmm,
    aten.bmm.default: _matrices(0, 1),
    aten.baddbmm.default: _matrices(1, 2),
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
}
"""What an operator holds inside, from its arguments."""

UNPRICED = frozenset(
    {
        aten.convolution.default,  # cuDNN's algorithm decides
        aten.convolution_backward.default,
        aten._cudnn_rnn.default,  # its workspace
        aten._cudnn_rnn_backward.default,
    }
)
"""Operators known to take temporaries that no entry tells; each use is counted and reported."""
