"""Recurrent cells and networks: the fused operators that CUDA has, forward and backward."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from card_figures import blocks
from torch import nn
from torch.utils.flop_counter import flop_registry

import bench.vgpu as vgpu
from bench.vgpu import recurrent


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


KINDS = [(nn.LSTM, "ThnnFusedLstmCellBackward0"), (nn.GRU, "ThnnFusedGruCellBackward0")]
OPTIONS = [{}, {"bidirectional": True, "num_layers": 2, "dropout": 0.1}]


@pytest.mark.parametrize(("kind", "node"), KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_networks_are_one_operator_or_cells(card: vgpu.Device, kind: Any, node: str, options: dict[str, Any]) -> None:
    network = kind(8, 16, batch_first=True, **options).to("vgpu")
    for cudnn in (True, False):
        network.zero_grad()
        with torch.backends.cudnn.flags(enabled=cudnn):
            out, _ = network(torch.rand(4, 5, 8, device="vgpu"))
        assert out.shape == (4, 5, 16 * (2 if options else 1))
        assert nodes(out)["CudnnRnnBackward0"] == cudnn
        assert nodes(out)[node] == (0 if cudnn else 5 * (4 if options else 1))
        out.sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in network.parameters())


def test_what_cudnn_takes_unknown_is_counted(card: vgpu.Device) -> None:
    network = nn.LSTM(8, 16, num_layers=2, dropout=0.1).to("vgpu")
    x = torch.rand(5, 4, 8, device="vgpu")
    network(x)
    assert card.unpriced == {
        "cuDNN RNN reserve beyond its lower bound": 1,
        "cuDNN dropout state": 1,
        "aten._cudnn_rnn.default": 1,  # its workspace
    }
    card.unpriced.clear()
    with torch.backends.cudnn.flags(enabled=False):
        network(x)
    assert not card.unpriced
    network.eval()(x)
    assert set(card.unpriced) == {"aten._cudnn_rnn.default"}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (nn.LSTM, lambda layers: 5 * layers + (layers - 1)),  # gates, cell state; outputs of inner layers
        (nn.GRU, lambda layers: 4 * layers + (layers - 1)),  # gates, product of the state
        (nn.RNN, lambda layers: layers - 1),
    ],
)
@pytest.mark.parametrize(
    ("layers", "directions", "steps", "batch"), [(1, 1, 50, 16), (4, 1, 250, 10), (3, 2, 7, 5), (2, 2, 100, 3)]
)
def test_reserve_space(
    card: vgpu.Device, kind: Any, values: Any, layers: int, directions: int, steps: int, batch: int
) -> None:
    network = kind(24, 32, num_layers=layers, bidirectional=directions == 2).to("vgpu")
    x = torch.rand(steps, batch, 24, device="vgpu")
    before = torch.vgpu.memory_stats()["requested_bytes.all.current"]
    out, states = network(x)
    row, state = 32 * directions * 4, layers * directions * batch * 32 * 4
    # hx is made by the module; cuDNN gives hy, and with an LSTM there are cx and cy.
    kept = steps * batch * row * (1 + values(layers)) + state * (4 if kind is nn.LSTM else 2)
    assert torch.vgpu.memory_stats()["requested_bytes.all.current"] - before == kept
    del out, states
    assert torch.vgpu.memory_stats()["requested_bytes.all.current"] == before


def test_the_bound_of_an_lstm_is_the_published_size() -> None:
    """4 layers of 320 units (pytorch issue 2895, which does not tell the rows); a GRU's is larger than the bound."""
    lstm, gru = (recurrent.reserve_values(recurrent.Network(mode, 320, 0, 4, 1), 1) for mode in (2, 3))
    rows, rest = divmod(736_000_000, 4 * lstm)
    assert (rows, rest) == (25_000, 0)
    assert 4 * gru * rows <= 864_000_000


class TestWeights:
    def test_they_share_one_buffer(self, card: vgpu.Device) -> None:
        network = nn.LSTM(24, 32, num_layers=2, bidirectional=True).to("vgpu")
        values = sum(p.numel() for p in network.parameters())
        assert len({p.untyped_storage()._cdata for p in network.parameters()}) == 1
        assert torch.vgpu.memory_allocated() == blocks(values * 4)
        network(torch.rand(3, 2, 24, device="vgpu"))[0].sum().backward()
        assert len({p.grad.untyped_storage()._cdata for p in network.parameters() if p.grad is not None}) == 1

    def test_both_lie_there_while_they_are_flattened(self, card: vgpu.Device) -> None:
        network = nn.GRU(256, 512).to("vgpu")
        values = sum(p.numel() for p in network.parameters())
        held = torch.vgpu.memory_allocated()
        torch.vgpu.reset_peak_memory_stats()
        network.flatten_parameters()
        assert torch.vgpu.max_memory_allocated() == 2 * held == 2 * blocks(values * 4)
        assert torch.vgpu.memory_allocated() == held

    def test_without_biases_the_buffer_has_them_all_the_same(self, card: vgpu.Device) -> None:
        """aten/src/ATen/cudnn/Descriptors.h: CUDNN_RNN_DOUBLE_BIAS."""
        network = nn.LSTM(24, 32, bias=False).to("vgpu")
        weights = 4 * 32 * (24 + 32)
        assert torch.vgpu.memory_stats()["requested_bytes.all.current"] == (weights + 2 * 4 * 32) * 4
        network(torch.rand(3, 2, 24, device="vgpu"))[0].sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in network.parameters())

    def test_split_weights_are_compacted_at_each_call(self, card: vgpu.Device) -> None:
        network = copy.deepcopy(nn.LSTM(24, 32).to("vgpu"))
        values = sum(p.numel() for p in network.parameters())
        x = torch.rand(3, 2, 24, device="vgpu")
        before = torch.vgpu.memory_stats()["requested_bytes.all.current"]
        with torch.no_grad(), pytest.warns(UserWarning, match="not part of single contiguous chunk"):
            network.eval()(x)
        assert torch.vgpu.memory_stats()["requested_bytes.all.peak"] - before >= values * 4

    def test_projections(self, card: vgpu.Device) -> None:
        network = nn.LSTM(8, 16, proj_size=4, num_layers=2, bidirectional=True).to("vgpu")
        out, (hidden, memory) = network(torch.rand(5, 3, 8, device="vgpu"))
        assert (out.shape, hidden.shape, memory.shape) == ((5, 3, 8), (4, 3, 4), (4, 3, 16))
        out.sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in network.parameters())


def test_arithmetic_of_a_network(card: vgpu.Device) -> None:
    """One product of every matrix with every row; its backward makes two."""
    x, weights = meta(7, 3, 8), [meta(64, 8), meta(64, 16), meta(64), meta(64)]
    forward = flop_registry[torch.ops.aten._cudnn_rnn](x, weights, out_val=None)
    assert forward == 2 * 7 * 3 * 64 * (8 + 16)
    assert flop_registry[torch.ops.aten._cudnn_rnn_backward](x, weights, out_val=None) == 2 * forward


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_bfloat16_goes_by_cells_before_ampere() -> None:
    for target, fused in (("rtx4090", 1), ("v100_32", 0)):
        with vgpu.virtual_gpu(target):
            network = nn.LSTM(8, 16).to("vgpu", torch.bfloat16)
            out, _ = network(torch.rand(5, 4, 8, device="vgpu", dtype=torch.bfloat16))
            assert nodes(out)["CudnnRnnBackward0"] == fused


def test_autocast_copies_the_weights_at_each_call(card: vgpu.Device) -> None:
    network = nn.LSTM(256, 512).to("vgpu")
    values = sum(p.numel() for p in network.parameters())
    x = torch.rand(5, 4, 256, device="vgpu")
    before = torch.vgpu.memory_allocated()
    with torch.autocast("vgpu", torch.bfloat16):
        first, _ = network(x)
        one = torch.vgpu.memory_allocated() - before
        second, _ = network(x)
    assert first.dtype is torch.bfloat16
    assert one > blocks(values * 2)
    assert torch.vgpu.memory_allocated() - before >= 2 * blocks(values * 2)
    (first + second).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in network.parameters())


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
