"""Autocast: CUDA's operator lists, types of results, the cache of weights, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bench.vgpu as vgpu
from bench.vgpu.mode import VirtualMode

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """Conversions of type by shape."""
    counted: Counter[tuple[int, ...]] = Counter()
    charge = VirtualMode._charge

    def count(mode: VirtualMode, func: Any, args: Any, *rest: Any) -> None:
        if func is torch.ops.aten._to_copy.default:
            counted[tuple(args[0].shape)] += 1
        charge(mode, func, args, *rest)

    monkeypatch.setattr(VirtualMode, "_charge", count)
    return counted


def test_the_same_operators_as_on_cuda() -> None:
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    cuda = {name for name in names if registered(name, "AutocastCUDA")}
    assert len(cuda) > 100
    in_cuda_builds = {"aten::_cudnn_rnn"}  # aten/src/ATen/cudnn/AutocastRNN.cpp
    assert {name for name in names if registered(name, "AutocastPrivateUse1")} == cuda | in_cuda_builds


LOWER: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda x: x.mm(x),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: x[None].bmm(x[None]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "mv": lambda x: x.mv(x[0]),
    "linear": lambda x: F.linear(x, x),
    "linear with a bias": lambda x: F.linear(x, x, x[0]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "conv2d": lambda x: F.conv2d(x[None, None], x[None, None]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, None], x[None, None]),
    "prelu": lambda x: F.prelu(x, x[0]),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
}
FLOAT32: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "pow": lambda x: x**2,
    "rsqrt": torch.rsqrt,
    "softplus": F.softplus,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "norm": lambda x: x.norm(),
    "norm over a dimension": lambda x: torch.norm(x, dim=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(8, dtype=torch.long, device="vgpu")),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long, device="vgpu")),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "sum": torch.sum,
    "sum over a dimension": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "cumsum": lambda x: x.cumsum(0),
    "vector_norm": torch.linalg.vector_norm,
}
AS_GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "add": lambda x: x + x,
    "mean": torch.mean,
    "gelu": F.gelu,
    "max": torch.max,
    "transpose": lambda x: x.t(),
    "cat": lambda x: torch.cat([x, x]),
    "dropout": F.dropout,
    "softmax with a type": lambda x: x.softmax(0, dtype=x.dtype),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
class TestResults:
    @pytest.mark.parametrize("call", LOWER.values(), ids=LOWER.keys())
    def test_lower(self, card: vgpu.Device, call: Any, given: torch.dtype, half: torch.dtype) -> None:
        x = torch.rand(8, 8, device="vgpu", dtype=given)
        with torch.autocast("vgpu", half):
            assert call(x).dtype is half

    @pytest.mark.parametrize("call", FLOAT32.values(), ids=FLOAT32.keys())
    def test_float32(self, card: vgpu.Device, call: Any, given: torch.dtype, half: torch.dtype) -> None:
        x = torch.rand(8, 8, device="vgpu", dtype=given)
        with torch.autocast("vgpu", half):
            assert call(x).dtype is torch.float32

    @pytest.mark.parametrize("call", AS_GIVEN.values(), ids=AS_GIVEN.keys())
    def test_as_given(self, card: vgpu.Device, call: Any, given: torch.dtype, half: torch.dtype) -> None:
        x = torch.rand(8, 8, device="vgpu", dtype=given)
        with torch.autocast("vgpu", half):
            assert call(x).dtype is given


@pytest.mark.parametrize("half", HALVES)
def test_promotes_to_the_widest(card: vgpu.Device, half: torch.dtype) -> None:
    narrow = torch.rand(4, 4, device="vgpu", dtype=half)
    wide = narrow.float()
    with torch.autocast("vgpu", half):
        assert torch.addcmul(narrow, narrow, narrow).dtype is half
        assert torch.addcmul(narrow, wide, narrow).dtype is torch.float32
        assert torch.atan2(wide, narrow).dtype is torch.float32
        assert torch.dot(narrow[0], wide[0]).dtype is torch.float32
        assert F.bilinear(narrow, wide, torch.rand(3, 4, 4, device="vgpu")).dtype is torch.float32


def test_leaves_other_types_and_devices_alone(card: vgpu.Device) -> None:
    with torch.autocast("vgpu", torch.float16):
        double = torch.rand(4, 4, device="vgpu", dtype=torch.float64)
        assert (double @ double).dtype is torch.float64
        assert torch.exp(double).dtype is torch.float64
        whole = torch.ones(4, dtype=torch.long, device="vgpu")
        assert whole.sum().dtype is torch.int64
        assert (torch.rand(4, 4) @ torch.rand(4, 4)).dtype is torch.float32


def test_refuses_what_cuda_refuses(card: vgpu.Device) -> None:
    x = torch.rand(4, device="vgpu")
    with torch.autocast("vgpu"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x, x)
    assert F.binary_cross_entropy(x, x).dtype is torch.float32


def test_defaults(card: vgpu.Device) -> None:
    assert torch.get_autocast_dtype("vgpu") is torch.float16
    assert torch.amp.is_autocast_available("vgpu")
    assert not torch.is_autocast_enabled("vgpu")
    with torch.autocast(device_type="vgpu"):
        assert torch.is_autocast_enabled("vgpu")
    assert not torch.is_autocast_enabled("vgpu")


def test_nested(card: vgpu.Device) -> None:
    x = torch.rand(4, 4, device="vgpu")
    with torch.autocast("vgpu", torch.float16):
        with torch.autocast("vgpu", enabled=False):
            assert (x @ x).dtype is torch.float32
            with torch.autocast("vgpu", torch.bfloat16):
                assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.float16
    assert (x @ x).dtype is torch.float32


def test_gradients_have_the_type_of_their_parameters(card: vgpu.Device) -> None:
    layer = nn.Linear(8, 8).to("vgpu")
    with torch.autocast("vgpu", torch.float16):
        out = layer(torch.rand(4, 8, device="vgpu"))
        loss = out.float().square().mean()
    assert out.dtype is torch.float16
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


class TestCache:
    def test_a_weight_used_twice_is_cast_once(self, card: vgpu.Device, casts: Counter[Any]) -> None:
        layer = nn.Linear(8, 8, bias=False, device="vgpu")
        x = torch.rand(4, 8, device="vgpu")
        with torch.autocast("vgpu", torch.float16):
            layer(layer(x)).sum().backward()
        assert casts[8, 8] == 2  # forward, and back in the backward

    def test_it_ends_with_the_outermost_context(self, card: vgpu.Device, casts: Counter[Any]) -> None:
        weight = torch.rand(8, 8, device="vgpu", requires_grad=True)
        x = torch.rand(4, 8, device="vgpu", dtype=torch.float16)
        before = torch.vgpu.memory_allocated()
        with torch.autocast("vgpu", torch.float16):
            with torch.autocast("vgpu", torch.float16):
                x @ weight
            x @ weight
            assert casts[8, 8] == 1
            assert torch.vgpu.memory_allocated() == before + 512 + 8_519_680
        assert torch.vgpu.memory_allocated() == before + 8_519_680
        with torch.autocast("vgpu", torch.float16):
            x @ weight
        assert casts[8, 8] == 2

    @pytest.mark.parametrize(
        "weight",
        [
            lambda: torch.rand(8, 8, device="vgpu"),  # wants no gradient
            lambda: torch.rand(8, 8, device="vgpu", requires_grad=True) * 1,  # no leaf
            lambda: torch.rand(2, 8, 8, device="vgpu", requires_grad=True)[0],  # a view
        ],
    )
    def test_only_for_leaves_that_train(self, card: vgpu.Device, casts: Counter[Any], weight: Any) -> None:
        made = weight()
        x = torch.rand(4, 8, device="vgpu", dtype=torch.float16)
        with torch.autocast("vgpu", torch.float16):
            x @ made
            x @ made
        assert casts[8, 8] == 2

    def test_can_be_switched_off(self, card: vgpu.Device, casts: Counter[Any]) -> None:
        weight = torch.rand(8, 8, device="vgpu", requires_grad=True)
        x = torch.rand(4, 8, device="vgpu", dtype=torch.float16)
        with torch.autocast("vgpu", torch.float16, cache_enabled=False):
            x @ weight
            x @ weight
        assert casts[8, 8] == 2

    def test_a_new_tensor_is_not_taken_for_an_old_one(self, card: vgpu.Device, casts: Counter[Any]) -> None:
        x = torch.rand(4, 8, device="vgpu", dtype=torch.float16)
        with torch.autocast("vgpu", torch.float16):
            for _ in range(3):
                x @ torch.rand(8, 8, device="vgpu", requires_grad=True)
        assert casts[8, 8] == 3

    def test_recomputation_casts_again(self, card: vgpu.Device, casts: Counter[Any]) -> None:
        layer = nn.Linear(8, 8, bias=False, device="vgpu")
        x = torch.rand(4, 8, device="vgpu", requires_grad=True)
        with torch.autocast("vgpu", torch.float16):
            loss = checkpoint(layer, x, use_reentrant=False).sum()
        assert casts[8, 8] == 1
        loss.backward()
        assert casts[8, 8] == 3


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="vgpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("vgpu")
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="vgpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert not torch.is_autocast_enabled("vgpu")
        return gradient @ x.t()


def test_custom_functions(card: vgpu.Device) -> None:
    x = torch.rand(4, 4, device="vgpu", dtype=torch.float16, requires_grad=True)
    with torch.autocast("vgpu", torch.float16):
        out = Square.apply(x)
    assert out.dtype is torch.float32
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float16
