"""Recurrent cells and networks: the fused operators that CUDA has, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from card_figures import blocks
from torch import nn

import bench.vgpu as vgpu


def nodes(tensor: torch.Tensor) -> Counter[str]:
    """Names of the nodes behind a tensor."""
    found: dict[Any, str] = {}
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            waiting += [edge[0] for edge in node.next_functions]
    return Counter(found.values())


def test_lstm_cell_is_fused(card: vgpu.Device) -> None:
    cell = nn.LSTMCell(8, 16).to("vgpu")
    hidden, memory = cell(torch.rand(4, 8, device="vgpu"))
    assert nodes(hidden)["ThnnFusedLstmCellBackward0"] == 1
    (hidden.sum() + memory.sum()).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in cell.parameters())


def test_lstm_cell_keeps_states_and_gates(card: vgpu.Device) -> None:
    cell = nn.LSTMCell(256, 512).to("vgpu")
    x = torch.rand(64, 256, device="vgpu")
    state = (torch.zeros(64, 512, device="vgpu"), torch.zeros(64, 512, device="vgpu"))
    before = torch.vgpu.memory_allocated()
    out = cell(x, state)
    # New states and activated gates; both products too, which a second derivative would need.
    one = 64 * 512 * 4
    assert torch.vgpu.memory_allocated() - before == 8_519_680 + blocks(one, one, 4 * one, 4 * one, 4 * one)
    del out


def test_gru_cell_is_fused(card: vgpu.Device) -> None:
    cell = nn.GRUCell(8, 16).to("vgpu")
    hidden = cell(torch.rand(4, 8, device="vgpu"))
    assert nodes(hidden)["ThnnFusedGruCellBackward0"] == 1
    hidden.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in cell.parameters())


def test_cells_without_bias(card: vgpu.Device) -> None:
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        cell = kind(8, 16, bias=False).to("vgpu")
        out = cell(torch.rand(4, 8, device="vgpu"))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert all(p.grad is not None for p in cell.parameters())


@pytest.mark.parametrize(
    ("kind", "node"), [(nn.LSTM, "ThnnFusedLstmCellBackward0"), (nn.GRU, "ThnnFusedGruCellBackward0")]
)
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2, "dropout": 0.1}])
def test_networks_run_cell_by_cell(card: vgpu.Device, kind: Any, node: str, options: dict[str, Any]) -> None:
    network = kind(8, 16, batch_first=True, **options).to("vgpu")
    out, _ = network(torch.rand(4, 5, 8, device="vgpu"))
    assert nodes(out)[node] == 5 * (4 if options else 1)
    out.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_cudnns_reserve_space_is_counted_as_unpriced(card: vgpu.Device) -> None:
    network = nn.LSTM(8, 16).to("vgpu")
    network(torch.rand(5, 4, 8, device="vgpu"))
    (note,) = card.unpriced
    assert note.startswith("cuDNN's reserve space of aten.lstm.input")
    card.unpriced.clear()
    with torch.backends.cudnn.flags(enabled=False):
        network(torch.rand(5, 4, 8, device="vgpu"))
    assert not card.unpriced


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_half_precision(card: vgpu.Device, kind: Any) -> None:
    network = kind(8, 16).to("vgpu")
    with torch.autocast("vgpu", torch.float16):
        out, _ = network(torch.rand(5, 4, 8, device="vgpu"))
    assert out.dtype is torch.float16
    out.sum().backward()
    network.half()
    out, _ = network(torch.rand(5, 4, 8, device="vgpu").half())
    assert out.dtype is torch.float16


def test_packed_batch(card: vgpu.Device) -> None:
    network = nn.LSTM(8, 16, batch_first=True).to("vgpu")
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.rand(3, 5, 8, device="vgpu"), torch.tensor([5, 3, 2]), batch_first=True
    )
    out, (hidden, _) = network(packed)
    assert out.data.shape == (10, 16)
    assert hidden.shape == (1, 3, 16)
    out.data.sum().backward()
