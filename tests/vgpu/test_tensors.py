"""Tensors on the card as a user of torch.cuda makes, moves, views and frees them, and the bytes that they take."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bench.vgpu as vgpu

CARD = torch.device("vgpu", 0)


def allocated() -> int:
    return torch.vgpu.memory_allocated()


FACTORIES: dict[str, Callable[[], Tensor]] = {
    "tensor": lambda: torch.tensor([1.0, 2.0], device="vgpu"),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0], device="vgpu"),
    "as_tensor of an array": lambda: torch.as_tensor(np.ones(3), device="vgpu"),
    "empty": lambda: torch.empty(3, 4, device="vgpu"),
    "empty with a format": lambda: torch.empty(1, 2, 3, 4, device="vgpu", memory_format=torch.channels_last),
    "empty_strided": lambda: torch.empty_strided((2, 3), (1, 2), device="vgpu"),
    "zeros": lambda: torch.zeros((3,), device="vgpu:0"),
    "ones": lambda: torch.ones(3, device=torch.device("vgpu")),
    "full": lambda: torch.full((3,), 2.5, device=CARD),
    "arange": lambda: torch.arange(5, device="vgpu"),
    "linspace": lambda: torch.linspace(0, 1, 5, device="vgpu"),
    "eye": lambda: torch.eye(3, device="vgpu"),
    "rand": lambda: torch.rand(3, device="vgpu"),
    "randn": lambda: torch.randn(3, device="vgpu"),
    "randint": lambda: torch.randint(0, 5, (3,), device="vgpu"),
    "randperm": lambda: torch.randperm(5, device="vgpu"),
    "normal": lambda: torch.normal(0.0, 1.0, (3,), device="vgpu"),
    "bernoulli": lambda: torch.bernoulli(torch.full((3,), 0.5, device="vgpu")),
    "multinomial": lambda: torch.multinomial(torch.rand(5, device="vgpu"), 2),
    "hann_window": lambda: torch.hann_window(8, device="vgpu"),
    "like": lambda: torch.rand_like(torch.empty(3, device="vgpu")),
    "new": lambda: torch.empty(3, device="vgpu").new_zeros(4),
    "to of a host tensor": lambda: torch.rand(3).to("vgpu"),
    "to of an array": lambda: torch.from_numpy(np.ones(100_000)).to("vgpu"),
    "method": lambda: torch.rand(3).vgpu(),  # as .cuda()
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES.keys())
def test_factories(card: vgpu.Device, make: Callable[[], Tensor]) -> None:
    tensor = make()
    assert tensor.device == CARD
    assert tensor.is_vgpu
    assert tensor.get_device() == 0
    assert allocated() == 512 * -(-tensor.untyped_storage().nbytes() // 512)


def test_device_context_reaches_factories_and_modules(card: vgpu.Device) -> None:
    with torch.device("vgpu"):
        layer = nn.Linear(3, 3)
        tensors = [torch.zeros(3), torch.tensor([1, 2]), torch.rand(3), torch.arange(3), layer.weight, layer.bias]
    assert {tensor.device for tensor in tensors} == {CARD}
    assert torch.zeros(3).device.type == "cpu"


@pytest.mark.parametrize(
    ("elements", "block"), [(1, 512), (128, 512), (129, 1024), (2**18, 2**20), (2**18 + 1, 2**20 + 512)]
)
def test_blocks_are_multiples_of_512_bytes(card: vgpu.Device, elements: int, block: int) -> None:
    kept = torch.empty(elements, device="vgpu")
    assert allocated() == block
    del kept
    assert allocated() == 0


def test_remainder_of_a_large_segment_up_to_1_mib_stays_in_the_block(card: vgpu.Device) -> None:
    kept = torch.empty(19 * 2**20 + 512, dtype=torch.uint8, device="vgpu")
    assert allocated() == 20 * 2**20
    assert torch.vgpu.memory_stats()["requested_bytes.all.current"] == 19 * 2**20 + 512
    del kept


def test_empty_tensors_take_nothing(card: vgpu.Device) -> None:
    kept = torch.empty(0, 5, device="vgpu")
    assert allocated() == 0
    assert (kept @ torch.empty(5, 0, device="vgpu")).numel() == 0


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[2:, :1],
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(8, 4),
    "transpose": lambda x: x.t(),
    "expand": lambda x: x[:1].expand(5, 8),
    "permute": lambda x: x.permute(1, 0),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind()[0],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "diagonal": lambda x: x.diagonal(),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)),
    "view as another type": lambda x: x.view(torch.int32),
    "real": lambda x: torch.view_as_complex(x.view(2, 8, 2)),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to("vgpu"),
    "float": lambda x: x.float(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_share_the_block_and_keep_it(card: vgpu.Device, view: Callable[[Tensor], Tensor]) -> None:
    tensor = torch.empty(4, 8, device="vgpu")
    seen = view(tensor)
    assert allocated() == 512
    del tensor
    assert allocated() == 512
    del seen
    assert allocated() == 0


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "half": lambda x: x.half(),
    "index": lambda x: x[[0, 1]],
    "cat": lambda x: torch.cat([x, x]),
    "sum": lambda x: x + 1,
    "deepcopy": lambda x: copy.deepcopy(x),
    "repeat": lambda x: x.repeat(2, 1),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies_have_blocks_of_their_own(card: vgpu.Device, copied: Callable[[Tensor], Tensor]) -> None:
    tensor = torch.empty(4, 8, device="vgpu")
    made = copied(tensor)
    assert allocated() == 1024
    del tensor
    assert allocated() == 512
    assert made.device == CARD


def test_in_place_operators_allocate_nothing(card: vgpu.Device, peak_bytes: Callable[..., int]) -> None:
    tensor, other = torch.rand(100, 100, device="vgpu"), torch.rand(100, 100, device="vgpu")

    def change() -> None:
        tensor.add_(other).mul_(2).clamp_(0, 1).zero_().fill_(3).copy_(other).normal_().uniform_().sqrt_()
        tensor[1] = other[1]
        tensor.relu_().clamp_min_(0)
        torch._foreach_add_([tensor, other], 1.0)

    assert peak_bytes(change) == 0


def test_temporaries_are_freed_where_python_frees_them(card: vgpu.Device) -> None:
    tensor = torch.empty(128, device="vgpu")
    torch.vgpu.reset_peak_memory_stats()
    tensor = tensor * 2 + 1  # the product lives while the sum is made, and the old tensor until the name is bound
    assert torch.vgpu.max_memory_allocated() == 3 * 512
    assert allocated() == 512


def test_a_cycle_keeps_memory_until_it_is_collected(card: vgpu.Device) -> None:
    gc.collect()
    gc.disable()
    try:
        holder: list[object] = [torch.empty(128, device="vgpu")]
        holder.append(holder)
        del holder
        assert allocated() == 512
        gc.collect()
        assert allocated() == 0
    finally:
        gc.enable()


def test_storage_resize_frees_and_refills(card: vgpu.Device) -> None:
    tensor = torch.empty(1000, device="vgpu")
    tensor.untyped_storage().resize_(0)
    assert allocated() == 0
    tensor.untyped_storage().resize_(4000)
    assert allocated() == 4096


def test_resize_grows_by_copying_and_never_shrinks(card: vgpu.Device, peak_bytes: Callable[..., int]) -> None:
    tensor = torch.empty(0, device="vgpu")
    tensor.resize_(1000)
    assert allocated() == 4096
    assert peak_bytes(lambda: tensor.resize_(2000)) == 8192  # the new block beside the old one
    assert allocated() == 8192
    tensor.resize_(10)
    assert allocated() == 8192
    torch.empty(10, device="vgpu").resize_as_(torch.empty(5, device="vgpu"))
    assert allocated() == 8192


def test_out_arguments_are_written_to_and_enlarged(card: vgpu.Device, peak_bytes: Callable[..., int]) -> None:
    left, right = torch.rand(64, 64, device="vgpu"), torch.rand(64, 64, device="vgpu")
    out = torch.empty(64, 64, device="vgpu")
    assert peak_bytes(lambda: torch.add(left, right, out=out)) == 0
    small = torch.empty(0, device="vgpu")
    assert peak_bytes(lambda: torch.add(left, right, out=small)) == 64 * 64 * 4
    assert small.shape == (64, 64)


def test_set_takes_another_storage(card: vgpu.Device) -> None:
    tensor, other = torch.empty(1000, device="vgpu"), torch.empty(10, device="vgpu")
    tensor.set_(other)
    assert allocated() == 512
    assert tensor.shape == (10,)


class TestData:
    """`tensor.data = ...`."""

    def test_between_tensors_of_the_card(self, card: vgpu.Device) -> None:
        tensor, other = torch.empty(1000, device="vgpu"), torch.empty(10, device="vgpu")
        tensor.data = other
        assert allocated() == 512

    def test_moves_a_parameter_to_the_host_and_back(self, card: vgpu.Device) -> None:
        parameter = nn.Parameter(torch.rand(100_000, device="vgpu"))
        parameter.data = parameter.data.cpu()
        assert parameter.device.type == "cpu"
        assert allocated() == 0
        parameter.data = parameter.data.to("vgpu")
        assert parameter.device == CARD
        assert allocated() == 400_384

    def test_moves_a_real_parameter(self, card: vgpu.Device) -> None:
        parameter = nn.Parameter(torch.ones(3))
        same = parameter
        parameter.data = parameter.data.to("vgpu")
        assert isinstance(same, nn.Parameter)
        assert same.requires_grad
        (same * 2).sum().backward()
        assert same.grad is not None
        assert same.grad.device == CARD

    def test_leaves_the_gradient_where_it_is(self, card: vgpu.Device) -> None:
        parameter = nn.Parameter(torch.rand(100, device="vgpu"))
        parameter.sum().backward()
        parameter.data = parameter.data.cpu()
        assert parameter.grad is not None
        assert parameter.grad.device == CARD
        parameter.grad = parameter.grad.cpu()
        assert allocated() == 0

    def test_of_real_tensors_is_torchs(self, card: vgpu.Device) -> None:
        tensor = torch.rand(3)
        tensor.data = torch.ones(3)
        assert tensor.tolist() == [1.0, 1.0, 1.0]


class TestHost:
    """Copies between host and card."""

    def test_to_and_cpu(self, card: vgpu.Device) -> None:
        tensor = torch.rand(100_000).to("vgpu", torch.float16, non_blocking=True)
        assert tensor.device == CARD
        assert tensor.dtype is torch.float16
        assert allocated() == 200_192
        back = tensor.cpu()
        assert back.device.type == "cpu"
        assert allocated() == 200_192
        assert back.shape == tensor.shape

    def test_pinned_memory(self, card: vgpu.Device) -> None:
        for tensor in (torch.rand(3), torch.rand(100_000), torch.rand(3, device="vgpu").cpu()):
            assert not tensor.is_pinned()
            pinned = tensor.pin_memory()
            assert pinned.is_pinned()
            assert pinned[1:].is_pinned()
            assert not pinned.clone().is_pinned()
            assert pinned.to("vgpu", non_blocking=True).device == CARD
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert torch.rand(3).pin_memory().shape == (3,)

    def test_pinning_keeps_values(self, card: vgpu.Device) -> None:
        assert torch.arange(3).pin_memory().tolist() == [0, 1, 2]
        assert torch.arange(3).pin_memory().to("vgpu").tolist() == [0, 1, 2]

    def test_data_loader_pins_without_losing_values(self, card: vgpu.Device) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(5), torch.rand(5, 2))
        loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
        assert [tokens.to("vgpu").tolist() for tokens, _ in loader] == [[0, 1], [2, 3], [4]]

    def test_card_tensors_give_no_array(self, card: vgpu.Device) -> None:
        with pytest.raises(TypeError, match="can't convert vgpu:0 device type tensor to numpy"):
            torch.rand(3, device="vgpu").numpy()
        assert torch.rand(3, device="vgpu").cpu().numpy().shape == (3,)

    def test_operands_must_share_a_device(self, card: vgpu.Device) -> None:
        for size in (3, 100_000):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                torch.rand(size, device="vgpu") + torch.rand(size)
        assert (torch.rand(3, device="vgpu") * torch.tensor(2.0)).device == CARD


def test_large_host_tensors_cost_no_memory_of_ours(card: vgpu.Device) -> None:
    assert torch.rand(2**40).to(torch.float16).shape == (2**40,)
    with pytest.raises(torch.OutOfMemoryError):
        torch.rand(2**40, device="vgpu")


def test_deepcopy_keeps_kind_flags_and_gradient(card: vgpu.Device) -> None:
    layer = nn.Linear(4, 4).to("vgpu")
    layer(torch.rand(2, 4, device="vgpu")).sum().backward()
    twin = copy.deepcopy(layer)
    assert twin.weight is not layer.weight
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.requires_grad
    assert twin.weight.grad is not None
    assert twin.weight.grad is not layer.weight.grad
    with pytest.raises(RuntimeError, match="created explicitly by the user"):
        copy.deepcopy(layer.weight * 2)


def test_deepcopy_of_a_list_keeps_identities(card: vgpu.Device) -> None:
    tensor = torch.rand(3, device="vgpu")
    first, second = copy.deepcopy([tensor, tensor])
    assert first is second
    assert allocated() == 1024


def test_autograd_functions_and_transforms(card: vgpu.Device) -> None:
    x = torch.rand(3, device="vgpu", requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad is not None
    assert x.grad.device == CARD
    assert torch.func.grad(lambda y: (y**2).sum())(x).shape == (3,)
    assert torch.vmap(lambda y: y.sum())(torch.rand(4, 3, device="vgpu")).shape == (4,)


def test_inference_mode(card: vgpu.Device) -> None:
    with torch.inference_mode():
        assert (torch.rand(4, 4, device="vgpu") @ torch.rand(4, 4, device="vgpu")).device == CARD
        assert torch.arange(3, device="vgpu")[1:].tolist() == [1, 2]
