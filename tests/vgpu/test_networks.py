"""Networks: moved, trained, saved and loaded on the card as on CUDA, with the bytes that this takes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from card_figures import blocks, parameter_blocks
from torch import Tensor, nn

import bench.vgpu as vgpu


def allocated() -> int:
    return torch.vgpu.memory_allocated()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 10))


class TestMoving:
    def test_parameters_move_once(self, card: vgpu.Device) -> None:
        model = mlp()
        weight = model[0].weight
        assert model.to("vgpu") is model
        assert model[0].weight is weight
        assert {p.device for p in model.parameters()} == {torch.device("vgpu", 0)}
        assert allocated() == parameter_blocks(model)
        model.to(torch.device("vgpu"))
        assert allocated() == parameter_blocks(model)
        assert model.vgpu() is model  # as .cuda()

    def test_tied_weights_stay_tied(self, card: vgpu.Device) -> None:
        model = nn.ModuleDict({"embedding": nn.Embedding(50, 64), "head": nn.Linear(64, 50, bias=False)})
        model["head"].weight = model["embedding"].weight
        model.to("vgpu")
        assert model["head"].weight is model["embedding"].weight
        assert allocated() == 50 * 64 * 4
        model.half()
        assert model["head"].weight is model["embedding"].weight
        assert allocated() == 50 * 64 * 2 + 256  # blocks of 512

    def test_optimizer_made_before_the_move_steps(self, card: vgpu.Device) -> None:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        model.to("vgpu")
        before = [id(p) for p in model.parameters()]
        model(torch.rand(4, 300, device="vgpu")).sum().backward()
        optimizer.step()
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == before
        assert all(state["exp_avg"].device.type == "vgpu" for state in optimizer.state.values())

    def test_buffers_and_types(self, card: vgpu.Device) -> None:
        layer = nn.BatchNorm1d(8).to("vgpu")
        assert layer.running_mean is not None
        assert layer.running_mean.device.type == "vgpu"
        assert layer.num_batches_tracked is not None
        layer.half()
        assert layer.weight.dtype is layer.running_mean.dtype is torch.float16
        assert layer.num_batches_tracked.dtype is torch.int64
        layer.to(torch.bfloat16)
        assert layer.weight.dtype is torch.bfloat16

    def test_back_to_the_host(self, card: vgpu.Device) -> None:
        model = mlp().to("vgpu")
        model(torch.rand(4, 300, device="vgpu")).sum().backward()
        model.cpu()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cpu"}
        model.zero_grad()
        torch.vgpu.synchronize()
        assert allocated() == 2 * 8_519_680  # the workspaces stay

    def test_moving_parameter_by_parameter_peaks_one_above(self, card: vgpu.Device) -> None:
        model = mlp().to("vgpu")
        singles = parameter_blocks(model)
        torch.vgpu.reset_peak_memory_stats()
        model.half()
        assert torch.vgpu.max_memory_allocated() == singles + blocks(500 * 300 * 2)
        assert allocated() == parameter_blocks(model)

    def test_from_meta(self, card: vgpu.Device) -> None:
        with torch.device("meta"):
            model = mlp()
        assert allocated() == 0
        model.to_empty(device="vgpu")
        model[0].reset_parameters()
        assert allocated() == parameter_blocks(model)

    def test_deepcopy(self, card: vgpu.Device) -> None:
        model = mlp().to("vgpu")
        twin = copy.deepcopy(model)
        assert twin[0].weight is not model[0].weight
        assert isinstance(twin[0].weight, nn.Parameter)
        assert allocated() == 2 * parameter_blocks(model)
        large = nn.Linear(1000, 1000)
        assert copy.deepcopy(large).weight.device.type == "cpu"

    def test_averaged_model(self, card: vgpu.Device) -> None:
        model = mlp().to("vgpu")
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        averaged.update_parameters(model)
        assert averaged.module[0].weight.device.type == "vgpu"


class TestState:
    def test_state_dict_shares_and_load_copies(self, card: vgpu.Device) -> None:
        source, target = mlp().to("vgpu"), mlp().to("vgpu")
        held = allocated()
        state = source.state_dict()
        assert allocated() == held
        target.load_state_dict(state)
        assert allocated() == held
        target.load_state_dict({name: value.cpu() for name, value in state.items()})
        assert allocated() == held
        assert target[0].weight.device.type == "vgpu"

    def test_load_with_assign(self, card: vgpu.Device) -> None:
        source, target = mlp().to("vgpu"), mlp().to("vgpu")
        target.load_state_dict(source.state_dict(), assign=True)
        assert allocated() == parameter_blocks(source)

    def test_optimizer_state(self, card: vgpu.Device) -> None:
        model = mlp().to("vgpu")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.rand(4, 300, device="vgpu")).sum().backward()
        optimizer.step()
        other = torch.optim.Adam(model.parameters())
        other.load_state_dict(optimizer.state_dict())
        for state in other.state.values():
            assert state["exp_avg"].device.type == "vgpu"
            assert state["step"].device.type == "cpu"
            assert state["step"].item() == 1


class TestTraining:
    def test_bytes_of_one_step(self, card: vgpu.Device) -> None:
        """Parameters, gradients, the output, two workspaces; freed activations are gone."""
        model = mlp().to("vgpu")
        x = torch.rand(64, 300, device="vgpu")
        model(x).sum().backward()
        workspaces = 2 * 8_519_680
        assert allocated() == 2 * parameter_blocks(model) + blocks(64 * 300 * 4) + workspaces
        model.zero_grad()
        assert allocated() == parameter_blocks(model) + blocks(64 * 300 * 4) + workspaces

    def test_activations_live_until_the_backward(self, card: vgpu.Device) -> None:
        model = mlp().to("vgpu")
        x = torch.rand(64, 300, device="vgpu")
        torch.vgpu.memory_allocated()
        before = allocated() + 8_519_680
        loss = model(x).sum()
        kept = allocated() - before
        # ReLU's input dies: its backward needs the output only. The last layer's output dies too: the sum keeps sizes.
        assert kept == blocks(64 * 500 * 4, 4)
        with torch.no_grad():
            model(x)
        assert allocated() - before == kept
        del loss
        assert allocated() == before

    def test_gradients_accumulate_in_place(self, card: vgpu.Device) -> None:
        model = mlp().to("vgpu")
        x = torch.rand(64, 300, device="vgpu")
        model(x).sum().backward()
        held = allocated()
        gradient = model[0].weight.grad
        model(x).sum().backward()
        assert model[0].weight.grad is gradient
        assert allocated() == held

    def test_gradients_freed_by_hooks_never_add_up(self, card: vgpu.Device) -> None:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).to("vgpu")
        x = torch.rand(1, 512, device="vgpu")
        model(x).sum().backward()
        model.zero_grad()

        def drop(parameter: Tensor) -> None:
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(drop)
        before = allocated()
        torch.vgpu.reset_peak_memory_stats()
        model(x).sum().backward()
        assert torch.vgpu.max_memory_allocated() - before < 2 * 512 * 512 * 4
        assert allocated() == before

    def test_clipping(self, card: vgpu.Device) -> None:
        model = mlp().to("vgpu")
        model(torch.rand(4, 300, device="vgpu")).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.device.type == "vgpu"
        nn.utils.clip_grad_value_(model.parameters(), 1.0)

    @pytest.mark.parametrize(
        ("make", "shape"),
        [
            (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), (2, 3, 16, 16)),
            (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.GroupNorm(2, 4), nn.GELU()), (2, 3, 8, 8)),
            (lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.1)), (2, 16)),
            (lambda: nn.Sequential(nn.RMSNorm(16), nn.SiLU(), nn.Softmax(-1)), (2, 16)),
            (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), (2, 16)),
            (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), (2, 16)),
            (lambda: nn.TransformerEncoderLayer(16, 2, batch_first=True), (2, 5, 16)),
            (lambda: nn.Transformer(16, 2, 1, 1, batch_first=True), (2, 5, 16)),
        ],
        ids=[
            "conv",
            "transposed conv",
            "layer norm",
            "rms norm",
            "weight norm",
            "spectral norm",
            "encoder",
            "transformer",
        ],
    )
    def test_layers_run_forward_and_backward(
        self, card: vgpu.Device, make: Callable[[], nn.Module], shape: tuple[int, ...]
    ) -> None:
        model = make().to("vgpu")
        x = torch.rand(shape, device="vgpu", requires_grad=True)
        inputs = (x, x) if isinstance(model, nn.Transformer) else (x,)
        model(*inputs).sum().backward()
        assert x.grad is not None
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        model.eval()
        with torch.no_grad():
            assert model(*inputs).device.type == "vgpu"

    @pytest.mark.parametrize(
        "loss",
        [
            lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device="vgpu")),
            lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device="vgpu"), label_smoothing=0.1),
            lambda x: F.mse_loss(x, torch.rand(4, 8, device="vgpu")),
            lambda x: F.binary_cross_entropy_with_logits(x, torch.rand(4, 8, device="vgpu")),
            lambda x: F.kl_div(x, torch.rand(4, 8, device="vgpu"), reduction="batchmean"),
            lambda x: x.logsumexp(-1).mean() + x.std() + torch.linalg.norm(x) + x.topk(2)[0].sum() + x.max(1)[0].sum(),
            lambda x: torch.cdist(x, x).sum() + x.cumsum(0).sum() + F.interpolate(x[None, None], scale_factor=2).sum(),
            lambda x: F.embedding(torch.tensor([1, 2], device="vgpu"), x).sum() + x.gather(1, x.argmax(1, True)).sum(),
            lambda x: torch.fft.rfft(x).abs().sum() + torch.einsum("ij,kj->ik", x, x).sum(),
            lambda x: torch.linalg.inv(x @ x.t()).sum() + torch.linalg.svdvals(x).sum(),
        ],
        ids=["ce", "smoothed", "mse", "bce", "kl", "reductions", "distances", "gathers", "fft", "linalg"],
    )
    def test_losses_run_backward(self, card: vgpu.Device, loss: Callable[[Tensor], Tensor]) -> None:
        x = torch.rand(4, 8, device="vgpu", requires_grad=True)
        loss(x).backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape

    @pytest.mark.parametrize(("last", "first"), [("input", "weight"), ("weight", "input"), ("input", None)])
    def test_convolutions_keep_channels_last(self, card: vgpu.Device, last: str, first: str | None) -> None:
        """cuDNN takes the layout from the input or the weight (aten/src/ATen/native/ConvUtils.h)."""
        layer = nn.Conv2d(4, 8, 3, bias=False).to("vgpu")
        x = torch.rand(2, 4, 9, 9, device="vgpu")
        if last == "input" or first is None:
            x = x.contiguous(memory_format=torch.channels_last)
        if last == "weight" or first is None:
            layer = layer.to(memory_format=torch.channels_last)
        x.requires_grad_()
        out = layer(x)
        out.sum().backward()
        assert x.grad is not None
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert layer.weight.grad is not None
        assert x.grad.is_contiguous(memory_format=torch.channels_last) == (last == "input" or first is None)
        assert nn.Conv2d(4, 8, 3).to("vgpu")(torch.rand(2, 4, 9, 9, device="vgpu")).is_contiguous()
        assert layer.double()(x.double()).is_contiguous()

    def test_dropout_keeps_a_byte_for_each_element(self, card: vgpu.Device) -> None:
        x = torch.rand(1000, 1000, device="vgpu", requires_grad=True)
        before = allocated()
        y = F.dropout(x)
        assert torch.vgpu.memory_stats()["requested_bytes.all.current"] == 4_000_000 + 4_000_000 + 1_000_000
        assert y.grad_fn is not None
        assert y.grad_fn.name() == "NativeDropoutBackward0"
        assert allocated() - before >= 5_000_000

    def test_lbfgs(self, card: vgpu.Device) -> None:
        layer = nn.Linear(8, 1).to("vgpu")
        optimizer = torch.optim.LBFGS(layer.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = layer(torch.rand(4, 8, device="vgpu")).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
