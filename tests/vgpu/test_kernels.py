"""Durations: what counts as traffic, what bounds a kernel, what a launch costs the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import bench.vgpu as vgpu
from bench.vgpu.clock import Bound
from bench.vgpu.kernels import Kernels, tensors_in, total_bytes

aten = torch.ops.aten
CARD = replace(
    vgpu.find_target("rtx4090"),
    attained_bytes_s=1e9,
    matmul_flops_s={"fp32": 1e12, "bf16": 4e12},
    launch_s=1e-5,
    view_s=1e-6,
)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def seconds(func, *args, **kwargs):
    """Duration of an operator run on meta tensors, and its bound."""
    result = func(*args, **kwargs)
    outputs = tensors_in([result] if isinstance(result, torch.Tensor) else result or [args[0]])
    return Kernels(CARD).duration(func, args, kwargs, tensors_in(args), outputs)


@pytest.mark.parametrize(
    ("call", "elements"),
    [
        pytest.param(lambda x: (aten.exp.default, x), 2, id="one in, one out"),
        pytest.param(lambda x: (aten.mul.Tensor, x, x.clone()), 3, id="two in"),
        pytest.param(lambda x: (aten.mul.Tensor, x, x), 2, id="the same twice is read once"),
        pytest.param(lambda x: (aten.mul_.Tensor, x, x.clone()), 3, id="in place"),
        pytest.param(lambda x: (aten.zero_.default, x), 1, id="filled without reading"),
        pytest.param(lambda x: (aten.copy_.default, x, x.clone()), 2, id="copied over"),
        pytest.param(lambda x: (aten._foreach_mul_.Scalar, [x], 2.0), 2, id="a list in place"),
        pytest.param(lambda x: (aten._foreach_sqrt.default, [x]), 2, id="a list out of place"),
    ],
)
def test_traffic(call, elements):
    x = meta(1000, 1000)
    func, *args = call(x)
    duration, bound = seconds(func, *args)
    assert duration == pytest.approx(elements * 4e6 / 1e9)
    assert bound is Bound.BANDWIDTH


def test_expanded_elements_are_read_once():
    row = meta(1, 1000)
    assert total_bytes([row.expand(1000, 1000)]) == 4000
    assert seconds(aten.add.Tensor, meta(1000, 1000), row.expand(1000, 1000))[0] == pytest.approx(8.004e6 / 1e9)


def test_indexing_reads_what_it_picks():
    index = meta(10, dtype=torch.int64)
    assert seconds(aten.index_select.default, meta(10**6, 8), 0, index)[0] == pytest.approx((2 * 320 + 80) / 1e9)


@pytest.mark.parametrize(("func", "copies"), [(aten.scatter_add_.default, 0), (aten.scatter_add.default, 2)])
def test_scattering_touches_what_it_writes(func, copies):
    target, index, source = meta(1000, 1000), meta(10, 1000, dtype=torch.int64), meta(10, 1000)
    expected = 80_000 + 3 * 40_000 + copies * 4_000_000
    assert seconds(func, target, 0, index, source)[0] == pytest.approx(expected / 1e9)


@pytest.mark.parametrize(
    ("func", "args"), [(aten.empty_like.default, (meta(9, 9),)), (aten._unsafe_view.default, (meta(9, 9), [81]))]
)
def test_what_launches_nothing_costs_the_host_alone(func, args):
    assert seconds(func, *args)[0] == 0
    assert Kernels(CARD).launch_s(func) == 1e-6
    assert Kernels(CARD).launch_s(aten.exp.default) == 1e-5


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, 1e12), (torch.bfloat16, 4e12)])
def test_large_products_run_at_the_rate_of_their_type(dtype, rate):
    size = 16384
    duration, bound = seconds(aten.mm.default, meta(size, size, dtype=dtype), meta(size, size, dtype=dtype))
    assert duration == pytest.approx(2 * size**3 / rate)
    assert bound is Bound.COMPUTE


def test_a_matrix_times_a_vector_runs_at_bandwidth():
    duration, bound = seconds(aten.mm.default, meta(8192, 8192), meta(8192, 1))
    assert duration == pytest.approx((8192**2 + 2 * 8192) * 4 / 1e9)
    assert bound is Bound.BANDWIDTH


def test_tf32_is_for_convolutions_and_for_whom_asks():
    kernels = Kernels(replace(CARD, matmul_flops_s={"fp32": 1e12, "tf32": 8e12}))
    assert kernels._rate(aten.mm, torch.float32) == 1e12
    assert kernels._rate(aten.convolution, torch.float32) == 8e12
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert kernels._rate(aten.mm, torch.float32) == 8e12
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_a_step_of_views_and_launches_takes_the_host_so_long():
    idle = replace(CARD, attained_bytes_s=float("inf"))
    with vgpu.virtual_gpu(idle) as device:
        x = torch.empty(4, 4, device="vgpu")
        start = device.clock.host_s
        x.view(16).exp()
        assert device.clock.host_s - start == pytest.approx(1.1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_the_first_convolution_of_a_network_wants_no_gradient_of_its_input(bias):
    """Arithmetic of the weight's gradient alone, which is that of the forward."""
    image, weight, gradient = meta(4, 3, 16, 16), meta(8, 3, 3, 3), meta(4, 8, 16, 16)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    arguments = (gradient, image, weight, [8] if bias else None, *geometry)
    kernels, func = Kernels(replace(CARD, matmul_flops_s={"fp32": 1e6})), aten.convolution_backward.default
    durations = []
    for mask in ([True, True, bias], [False, True, bias], [True, False, bias]):
        outputs = tensors_in(func(*arguments, mask))
        durations.append(kernels.duration(func, (*arguments, mask), {}, [gradient, image, weight], outputs)[0])
    one = 2 * 4 * 8 * 16 * 16 * 27 / 1e6
    assert durations == pytest.approx([2 * one, one, one])
