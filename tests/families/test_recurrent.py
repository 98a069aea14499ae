"""Recurrent networks: as cells, whose fused operators keep other tensors than the CPU's, and as one cuDNN operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_bytes import Family, Term, adamw, agree
from torch import Tensor, nn

WIDTH, HIDDEN, CLASSES = 24, 32, 5


class Cells(nn.Module):
    """A cell, step by step, and a class for every step."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell = kind(WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state, outs = None, []
        for step in x.unbind():
            state = self.cell(step, state)
            outs.append(state[0] if isinstance(state, tuple) else state)
        classes: Tensor = self.head(torch.stack(outs))
        return classes


class Network(nn.Module):
    """nn.LSTM, nn.GRU or nn.RNN, packed if sequences have lengths, and a class for every step."""

    def __init__(self, kind: Any, lengths: Sequence[int] | None, **options: Any) -> None:
        super().__init__()
        self.network = kind(WIDTH, HIDDEN, **options)
        self.lengths = lengths
        self.head = nn.Linear(HIDDEN * (1 + options.get("bidirectional", False)), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            out = self.network(x)[0]
        else:
            lengths = torch.tensor(self.lengths)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, self.network.batch_first)
            out = self.network.forward(packed)[0].data  # hooks of MemTracker cannot take packed sequences apart
        classes: Tensor = self.head(out)
        return classes


def tagging(model: Callable[[], nn.Module], x: tuple[int, ...], rows: int, **options: Any) -> Family:
    """Cross entropy over the classes of all steps."""
    return Family(
        model=model,
        batch=lambda device: (torch.rand(*x, WIDTH, device=device), torch.zeros(rows, dtype=torch.long, device=device)),
        loss=lambda model, x, classes: F.cross_entropy(model(x).view(-1, CLASSES), classes),
        optimizer=adamw,
        **options,
    )


SIZES = [(6, 4), (12, 4), (9, 8)]


@pytest.mark.parametrize(("steps", "batch"), SIZES)
def test_plain_cells(steps: int, batch: int) -> None:
    assert not agree(tagging(lambda: Cells(nn.RNNCell), (steps, batch), steps * batch)).unpriced


@pytest.mark.parametrize(("steps", "batch"), SIZES)
def test_gated_cells(steps: int, batch: int) -> None:
    """Both products, of three gates each, and five values of its own, where the CPU keeps six for its formulas.

    aten/src/ATen/native/cuda/RNN.cu and native/RNN.cpp. A backward is largest where the second cell's weight gradients
    are added to the first's: two cells are gone.
    """
    state = batch * HIDDEN * 4
    more = (3 + 3 + 5) - 6
    agree(
        tagging(lambda: Cells(nn.GRUCell), (steps, batch), steps * batch),
        Term("fused cells keep products", steps * more * state, frozenset({"forward, peak", "forward, after"})),
        Term("fused cells keep products", (steps - 2) * more * state, frozenset({"backward, peak"})),
    )


@pytest.mark.parametrize(("steps", "batch"), SIZES)
def test_lstm_cells(steps: int, batch: int) -> None:
    """Both products and the gates, of four each; the CPU keeps the gates, and of a cell state its tanh.

    The last cell's state is kept for its own derivative. Until the network returns, the last states live: both on the
    CPU, on the card only the hidden one, as the graph has the other; then the loss makes logits and two numbers.
    At the backward's peak the gates' gradient is still to be multiplied with the input, which on the CPU it has been.
    """
    state, logits, numbers = batch * HIDDEN * 4, steps * batch * CLASSES * 4, 8
    more = (4 + 4 + 4) - (4 + 1)
    card_peak, cpu_peak = (max(states * state - numbers, logits) for states in (1, 2))
    forward, backward = frozenset({"forward, peak", "forward, after"}), frozenset({"backward, peak"})
    agree(
        tagging(lambda: Cells(nn.LSTMCell), (steps, batch), steps * batch),
        Term("fused cells keep products", steps * more * state, forward),
        Term("fused cells keep products", (steps - 2) * more * state, backward),
        Term("the last cell's state is kept", state, forward | backward),
        Term("so it does not live beside the graph", card_peak - cpu_peak, frozenset({"forward, peak"})),
        Term("the gates' gradient waits for a product", 4 * state, backward),
    )


def values_kept(kind: Any, layers: int) -> int:
    """Values of cuDNN's reserve space for each row and unit of one direction: gates, cell states, outputs between."""
    return {nn.LSTM: 4 + 1, nn.GRU: 3 + 1, nn.RNN: 0}[kind] * layers + (layers - 1)


class OneOperator(torch.autograd.Function):
    """A network as one operator: outputs, states and reserve space, and its gradients all at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, swaps: bool, wide: int, values: int, lstm: bool, *rest: Tensor) -> Any:
        rows = x.transpose(0, 1) if swaps else x
        out = x.new_empty((*rows.shape[:-1], wide))
        reserve = x.new_empty((rows.shape[:-1].numel() * wide * values * x.itemsize,), dtype=torch.uint8)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, out, reserve, *rest)
        ctx.lstm = lstm
        return (out.transpose(0, 1) if swaps else out, *(torch.empty_like(state) for state in rest[: 1 + lstm]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        x, _, _, *rest = ctx.saved_tensors
        states, weights = rest[: 1 + ctx.lstm], rest[1 + ctx.lstm :]
        flat = x.new_empty((sum(weight.numel() for weight in weights),))
        parts = flat.split([weight.numel() for weight in weights])
        pieces = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        return (torch.empty_like(x), None, None, None, None, *map(torch.empty_like, states), *pieces)


def cudnn_on_paper(kind: Any, layers: int) -> Callable[[pytest.MonkeyPatch], None]:
    """torch's functions of networks, as `OneOperator`."""
    name = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[kind]

    def network(x: Tensor, *args: Any) -> Any:
        packed = not isinstance(args[1], list)  # its batch sizes come before states and weights
        state, weights, *rest = args[packed:]
        states = list(state) if kind is nn.LSTM else [state]
        directions = 2 if rest[4] else 1
        swaps = not packed and rest[5]
        wide = HIDDEN * directions
        return OneOperator.apply(x, swaps, wide, values_kept(kind, layers), kind is nn.LSTM, *states, *weights)

    return lambda patch: patch.setattr(torch.nn.modules.rnn._VF, name, network, raising=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    ("steps", "batch", "options"),
    [
        (7, 5, {}),
        (50, 3, {"num_layers": 2}),
        (9, 8, {"bidirectional": True}),
        (12, 4, {"num_layers": 3, "bidirectional": True}),
        (6, 4, {"num_layers": 2, "batch_first": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_networks(kind: Any, steps: int, batch: int, options: dict[str, Any]) -> None:
    x = (batch, steps) if options.get("batch_first") else (steps, batch)
    on_paper = cudnn_on_paper(kind, options.get("num_layers", 1))
    family = tagging(lambda: Network(kind, None, **options), x, steps * batch, on_paper=on_paper)
    assert agree(family).unpriced["cuDNN RNN reserve beyond its lower bound"] == 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("lengths", [(9, 9, 9), (40, 7, 3, 1)])
def test_packed_networks(kind: Any, lengths: Sequence[int]) -> None:
    """Rows of all steps and samples that there are, whatever the longest.

    The forward of the LSTM is largest inside the network, that of the GRU, which keeps less, in the loss.
    """
    family = tagging(
        lambda: Network(kind, lengths, num_layers=2),
        (max(lengths), len(lengths)),
        sum(lengths),
        on_paper=cudnn_on_paper(kind, 2),
    )
    on_host = -8 * (len(lengths) + max(lengths)) * (kind is nn.LSTM)
    agree(family, Term("lengths and batch sizes lie on the host", on_host, frozenset({"forward, peak"})))
