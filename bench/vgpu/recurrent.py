"""nn.LSTM, nn.GRU and nn.RNN with cuDNN: one operator, its weights in one buffer, and what it keeps for a backward.

Follows aten/src/ATen/native/cudnn/RNN.cpp and native/RNN.cpp, torch 2.13. How large cuDNN's workspace and reserve space
are, only cuDNN can tell (cudnnGetRNNTempSpaceSizes). The reserve space is taken at its lower bound, see
`reserve_values`, and counted as such; workspace and dropout state are counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import register_flop_formula

from bench.vgpu.autocast import cached_cast
from bench.vgpu.device import current

aten = torch.ops.aten

RELU, TANH, LSTM, GRU = range(4)
"""cuDNN's modes (cudnnRNNMode_t)."""

GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}

FUNCTIONS = {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_KEPT = {RELU: 0, TANH: 0, LSTM: 5, GRU: 4}
_SPLIT_WARNING = (
    "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted at "
    "every call, possibly greatly increasing memory usage. To compact weights again call flatten_parameters()."
)


class Network(NamedTuple):
    """What aten._cudnn_rnn is told of a network; sizes in elements."""

    mode: int
    hidden: int
    projection: int
    layers: int
    directions: int

    @property
    def out(self) -> int:
        """Width of one direction's output."""
        return self.projection or self.hidden


def reserve_values(network: Network, rows: int) -> int:
    """Fewest elements that a backward needs which repeats no product: a lower bound of cuDNN's reserve space.

    Per layer, direction, row and unit: the four gates and the cell state of an LSTM; the three gates of a GRU, and the
    product of its new gate with the hidden state, which the reset gate multiplies. Then the outputs of all layers but
    the last, and what a projection projects. The hidden states of a plain network are these outputs.

    Published sizes are no smaller. For 4 layers of 320 units and an unstated number of rows, cuDNN gave 736,000,000
    bytes to an LSTM and 864,000,000 to a GRU (pytorch issue 2895). At 25,000 rows the first is this bound, and the
    second, 27 / 23 of it, has six values where the bound has four.

    Args:
        network: The network.
        rows: Samples times steps; of a packed batch, steps of all samples.
    """
    inner = (network.layers - 1) * network.out
    kept = network.layers * network.hidden * (_KEPT[network.mode] + bool(network.projection))
    return rows * network.directions * (inner + kept)


def weight_values(network: Network, width: int) -> int:
    """Elements of the buffer of all weights; cuDNN's has two biases a gate, used or not.

    aten/src/ATen/cudnn/Descriptors.h sets CUDNN_RNN_DOUBLE_BIAS for every network.

    Args:
        network: The network.
        width: Of the input.
    """
    gates, total = GATES[network.mode] * network.hidden, 0
    for layer in range(network.layers):
        columns = width if layer == 0 else network.out * network.directions
        total += gates * (columns + network.out + 2) + network.projection * network.hidden
    return total * network.directions


def install(kernels: torch.library.Library) -> None:
    """Register the networks as one operator each, its shapes, arithmetic and casts; `kernels` is of aten."""
    for name, mode in FUNCTIONS.items():
        for overload in ("input", "data"):
            composite = getattr(getattr(aten, name), overload)
            kernels.impl(f"{name}.{overload}", _network(composite, mode, overload == "data"), "AutogradPrivateUse1")
    kernels.impl("_cudnn_rnn", _cast_and_flatten, "AutocastPrivateUse1")
    register_op_impl(aten._cudnn_rnn.default)(_forward)
    register_op_impl(aten._cudnn_rnn_backward.default)(_backward)
    register_flop_formula(aten._cudnn_rnn)(_flops)
    register_flop_formula(aten._cudnn_rnn_backward)(_backward_flops)


def _takes(source: Tensor) -> bool:
    """Whether cuDNN runs a network on this input (native/RNN.cpp, use_cudnn)."""
    kinds = [torch.float64, torch.float32, torch.float16]
    if current().target.capability >= (8, 0):
        kinds.append(torch.bfloat16)
    return torch.backends.cudnn.enabled and source.dtype in kinds and source.numel() > 0


def _network(composite: Any, mode: int, packed: bool) -> Callable[..., Any]:
    """lstm, gru, rnn_tanh or rnn_relu as CUDA runs them: by cuDNN, else step by step with the fused cells."""

    def kernel(source: Tensor, *args: Any) -> Any:
        if not _takes(source):
            return composite._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, source, *args)  # not torch._decomp
        batch_sizes = args[0].tolist() if packed else []
        state, weights, biased, layers, dropout, trains, bidirectional = args[packed : packed + 7]
        batch_first = False if packed else args[7]
        hx, cx = state if mode == LSTM else (state, None)
        projection = hx.size(2) if cx is not None and cx.size(2) != hx.size(2) else 0
        hidden = (hx if cx is None else cx).size(2)
        network = Network(mode, hidden, projection, layers, 1 + bidirectional)
        unpriced = current().unpriced
        if trains:
            unpriced["cuDNN RNN reserve beyond its lower bound"] += 1
        if trains and dropout:
            unpriced["cuDNN dropout state"] += 1
        out, hy, cy, _, _ = aten._cudnn_rnn(
            source,
            weights,
            (4 if biased else 2) + bool(projection),
            _shared_buffer(weights, weight_values(network, source.size(-1))),
            hx,
            cx,
            mode,
            hidden,
            projection,
            layers,
            batch_first,
            dropout,
            trains,
            bidirectional,
            batch_sizes,
            None,
        )
        return (out, hy, cy) if mode == LSTM else (out, hy)

    return kernel


def _shared_buffer(weights: Sequence[Tensor], values: int) -> Tensor | None:
    """The buffer that all these weights are views of; None, and a warning, if there is none (try_get_weight_buf)."""
    with torch.no_grad():
        whole = weights[0].detach()
        if (
            len({weight.untyped_storage()._cdata for weight in weights}) == 1
            and len({weight.storage_offset() for weight in weights}) == len(weights)
            and whole.untyped_storage().nbytes() >= values * whole.itemsize
        ):
            return whole.as_strided((values,), (1,), 0)
    warnings.warn(_SPLIT_WARNING, UserWarning, stacklevel=2)
    return None


def _pieces(buffer: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of `buffer`, one after the other."""
    pieces, start = [], 0
    for shape in shapes:
        pieces.append(buffer.narrow(0, start, shape.numel()).view(shape))
        start += shape.numel()
    return pieces


def flatten(module: nn.RNNBase) -> bool:
    """Lay a module's weights into one new buffer (_cudnn_rnn_flatten_weight); False: cuDNN would not take them."""
    weights: Any = module._flat_weights
    if len(weights) != len(module._flat_weights_names) or not all(isinstance(each, FakeTensor) for each in weights):
        return False
    if any(each.device.type != "vgpu" or each.dtype != weights[0].dtype for each in weights) or not _takes(weights[0]):
        return False
    if len({(each.untyped_storage()._cdata, each.storage_offset()) for each in weights}) != len(weights):
        return False
    network = Network(
        FUNCTIONS[module.mode.lower()],
        module.hidden_size,
        module.proj_size,
        module.num_layers,
        1 + module.bidirectional,
    )
    with torch.no_grad():
        buffer = weights[0].new_zeros((weight_values(network, module.input_size),))
        pieces = _pieces(buffer, [each.shape for each in weights])
        for piece, weight in zip(pieces, weights, strict=True):
            piece.copy_(weight)
        for piece, weight in zip(pieces, weights, strict=True):
            weight.data = piece
    return True


@contextmanager
def flattened_weights() -> Iterator[None]:
    """Let modules flatten their weights on the virtual card, too."""
    plain = nn.RNNBase.flatten_parameters

    def flatten_parameters(module: nn.RNNBase) -> None:
        if not flatten(module):
            plain(module)

    nn.RNNBase.flatten_parameters = flatten_parameters  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.RNNBase.flatten_parameters = plain  # type: ignore[method-assign]


def _cast_and_flatten(source: Tensor, weights: Sequence[Tensor], *args: Any) -> Any:
    """Autocast's form: input and states cast, weights copied to a new buffer at each call, as their gradients know.

    aten/src/ATen/cudnn/AutocastRNN.cpp, _cudnn_rnn_cast_reflatten.
    """
    dtype = torch.get_autocast_dtype("vgpu")
    stride, buffer, hx, cx, mode, hidden, projection, layers = args[:8]
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        if weights[0].dtype not in (dtype, torch.float64):
            network = Network(mode, hidden, projection, layers, 1 + args[11])
            buffer = weights[0].detach().new_zeros((weight_values(network, source.size(-1)),), dtype=dtype)
            pieces = [piece.detach() for piece in _pieces(buffer, [weight.shape for weight in weights])]
            weights = [piece.copy_(weight) for piece, weight in zip(pieces, weights, strict=True)]
        source, hx, cx = (cached_cast(each, dtype) for each in (source, hx, cx))
        return aten._cudnn_rnn(source, weights, stride, buffer, hx, cx, *args[4:])


def _forward(
    fake: FakeTensorMode,
    func: Any,
    source: Tensor,
    weights: Sequence[Tensor],
    stride: int,
    buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden: int,
    projection: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    trains: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """Output (laid out step by step), states, reserve space and weight buffer."""
    network = Network(mode, hidden, projection, layers, 1 + bidirectional)
    swaps = batch_first and not batch_sizes
    *rows, width = (source.transpose(0, 1) if swaps else source).shape
    out = source.new_empty((*rows, network.out * network.directions))
    reserve_bytes = reserve_values(network, out.shape[:-1].numel()) * source.itemsize * trains
    return (
        out.transpose(0, 1) if swaps else out,
        torch.empty_like(hx),
        source.new_empty((0,)) if cx is None else torch.empty_like(cx),
        source.new_empty((reserve_bytes,), dtype=torch.uint8),
        source.new_empty((weight_values(network, width),)) if buffer is None else buffer,
    )


def _backward(
    fake: FakeTensorMode,
    func: Any,
    source: Tensor,
    weights: Sequence[Tensor],
    stride: int,
    buffer: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    out: Tensor,
    grad_out: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    *args: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
    """Gradients of input, states and weights; those of weights with biases are views of one buffer."""
    if grad_out is None and grad_hy is None and grad_cy is None:
        return None, None, None, [None] * len(weights)
    batch_first, batch_sizes, mask = args[4], args[8], args[-1]
    swaps = batch_first and not batch_sizes
    steps_first = source.transpose(0, 1) if swaps else source
    grad_source = torch.empty_like(steps_first, memory_format=torch.contiguous_format)
    grads: list[Tensor | None] = []
    if mask[3]:
        biased = stride >= 4  # without biases the buffer has other strides, and is copied from
        shapes = [weight.shape for weight in weights]
        grads = [*_pieces(torch.empty_like(buffer), shapes)] if biased else [torch.empty_like(each) for each in weights]
    return (
        grad_source.transpose(0, 1) if swaps else grad_source,
        torch.empty_like(hx),
        None if cx is None else torch.empty_like(cx),
        grads,
    )


def _flops(source: Sequence[int], weights: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> int:
    """Two for each element of a matrix and row of the input."""
    rows = 1
    for size in source[:-1]:
        rows *= size
    return 2 * rows * sum(shape[0] * shape[1] for shape in weights if len(shape) == 2)


def _backward_flops(*args: Any, **kwargs: Any) -> int:
    """Gradients of the rows, and of the weights: as many again."""
    return 2 * _flops(*args, **kwargs)
