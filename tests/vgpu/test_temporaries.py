"""Memory inside operators: each entry of the table against a case worked out by hand, and the peak that it makes."""

from __future__ import annotations

from math import ceil

import pytest
import torch
import torch.nn.functional as F

import bench.vgpu as vgpu
from bench.vgpu import attention_space, sorting
from bench.vgpu.temporaries import TEMPORARIES, UNPRICED, Call
from bench.vgpu.workspaces import cublas_workspace_bytes, cublaslt_workspace_bytes

aten = torch.ops.aten
CARD = vgpu.find_target("rtx4090")
LATEST = (2, 13)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def sizes(func, *args, release=LATEST, target=CARD, **kwargs):
    """Sizes that live at once, the zeros left out, phase by phase."""
    phases = TEMPORARIES[func](Call(args, kwargs, target, release))
    return [[size for size in phase if size] for phase in phases]


def most(func, *args, **kwargs):
    """Bytes of the largest phase."""
    return max((sum(phase) for phase in sizes(func, *args, **kwargs)), default=0)


def sort_space(count, key, value):
    """cub's own space, by hand: second buffers, eight histograms, a look-back per tile."""
    tile = 384 * (21 * 4 // max(4, key, value))
    return count * (key + value) + key * 256 * 8 + ceil(count / tile) * 1024


def test_only_cudnns_networks_are_priced_in_part():
    assert UNPRICED & set(TEMPORARIES) == {aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default}


@pytest.mark.parametrize(
    ("capability", "release", "expected"),
    [
        ((8, 9), LATEST, 8_519_680),  # pytorch issue 95668
        ((9, 0), LATEST, 33_554_432),
        ((12, 0), (2, 11), 8_519_680),
        ((12, 0), (2, 12), 33_554_432),
        ((7, 0), (1, 10), 0),
    ],
)
def test_cublas_workspace_by_card_and_release(capability, release, expected):
    assert cublas_workspace_bytes(capability, None, release) == expected


def test_cublas_workspace_config():
    assert cublas_workspace_bytes((8, 0), ":4096:2:16:8") == 8_519_680
    assert cublas_workspace_bytes((8, 0), ":16:8") == 128 * 1024
    assert cublas_workspace_bytes((9, 0), "nonsense") == 33_554_432  # torch warns and takes the default


def test_a_bias_took_a_workspace_of_its_own_until_cublaslt_shared():
    bias, rows, weight = meta(8), meta(4, 16), meta(16, 8)
    assert sizes(aten.addmm.default, bias, rows, weight, release=(2, 6)) == [[2**20]]
    assert sizes(aten.addmm.default, bias, rows, weight) == [[]]
    assert [cublaslt_workspace_bytes(release) for release in ((1, 10), (2, 11), (2, 12))] == [0, 2**20, 0]


@pytest.mark.parametrize("transposed", [False, True])
def test_products_take_rows_or_columns_as_they_are(transposed):
    matrix = meta(64, 32).t() if transposed else meta(32, 64)
    assert sizes(aten.mm.default, matrix, meta(64, 8)) == [[]]


def test_products_copy_a_matrix_with_gaps_both_ways():
    gaps = meta(32, 64, 2)[..., 0]
    assert sizes(aten.mm.default, gaps, meta(64, 8)) == [[32 * 64 * 4]]
    assert sizes(aten.bmm.default, meta(2, 8, 32), meta(2, 32, 64, 2)[..., 0]) == [[2 * 32 * 64 * 4]]


@pytest.mark.parametrize("func", [aten._softmax.default, aten._log_softmax.default, aten.cumsum.default])
def test_kernels_over_one_dimension_copy_what_is_not_contiguous(func):
    assert sizes(func, meta(8, 16), 1) == [[]]
    assert sizes(func, meta(16, 8).t(), 1) == [[8 * 16 * 4]]


class TestEmbeddingBackward:
    def test_few_indices_need_nothing(self):
        assert (
            most(aten.embedding_dense_backward.default, meta(3072, 8), meta(3072, dtype=torch.int64), 99, -1, False)
            == 0
        )

    def test_partial_sums_are_as_wide_as_the_table(self):
        """Qwen3-4B, 4096 tokens: 409 whole tens and 4096 segments, 2560 floats each, though gradients are bf16."""
        gradient, tokens = meta(4096, 2560, dtype=torch.bfloat16), meta(4096, dtype=torch.int64)
        sort, sums = sizes(aten.embedding_dense_backward.default, gradient, tokens, 151_936, -1, False)
        assert sum(sort) == 3 * 4096 * 8 + sort_space(4096, 8, 8)
        assert max(sums) == (409 + 4096) * 2560 * 4
        assert sum(sums) - max(sums) == 5 * 4096 * 8 + 4505 * 8

    def test_few_segments_are_summed_by_atomics(self):
        gradient, tokens = meta(100_000, 64), meta(100_000, dtype=torch.int64)
        arguments = (aten.embedding_dense_backward.default, gradient, tokens, 100, -1, False)
        parts = 10_000 + 100
        assert max(sizes(*arguments)[1]) == 100_000 * 8
        assert max(sizes(*arguments, release=(2, 10))[1]) == parts * 64 * 4

    def test_the_peak_of_a_real_backward(self):
        with vgpu.virtual_gpu(CARD):
            device = torch.get_device_module("vgpu")
            table = torch.nn.Embedding(50_000, 256).to("vgpu")
            out = table(torch.zeros(4, 2048, dtype=torch.int64, device="vgpu"))
            before = device.memory_allocated()
            out.backward(torch.empty_like(out))
            gradients = (8192 + 50_000) * 256 * 4
            parts = (819 + 8192) * 256 * 4
            extra = device.max_memory_allocated() - before - gradients - parts
            assert 0 <= extra - (5 * 8192 * 8 + 9011 * 8) < 10 * 512  # rounded to blocks


class TestEmbeddingBagBackward:
    OFFSETS = (meta(64, dtype=torch.int64), meta(4096, dtype=torch.int64), meta(64, dtype=torch.int64), meta(0))

    def backward(self, indices, mode, **kwargs):
        bag = meta(indices, dtype=torch.int64)
        arguments = (meta(64, 32), bag, *self.OFFSETS, 50_000, kwargs.pop("by_frequency", False), mode, False, None, -1)
        return sizes(aten._embedding_bag_backward.default, *arguments)

    @pytest.mark.parametrize("mode", [0, 1])
    def test_sums_and_means_sort_however_few(self, mode):
        """As the embedding's backward, whose parts are one a segment and one for every ten indices."""
        sort, sums = self.backward(1000, mode)
        assert sum(sort) == 3 * 8000 + sort_space(1000, 8, 8)
        assert sorted(sums) == sorted([*[8000] * 5, 1100 * 8, 1100 * 32 * 4])

    def test_a_count_more_by_frequency(self):
        _, plain = self.backward(1000, 0)
        _, counted = self.backward(1000, 0, by_frequency=True)
        assert sum(counted) - sum(plain) == 8000

    def test_maxima_know_their_rows(self):
        assert self.backward(1000, 2) == [[]]

    def test_of_a_module(self):
        with vgpu.virtual_gpu(CARD) as card:
            table = torch.nn.EmbeddingBag(50_000, 64).to("vgpu")
            out = table(torch.zeros(32, 100, dtype=torch.int64, device="vgpu"))
            before = torch.vgpu.memory_allocated()
            out.backward(torch.empty_like(out))
            gradients = (32 * 64 + 50_000 * 64) * 4
            parts = (3200 + 320) * 64 * 4
            extra = torch.vgpu.max_memory_allocated() - before - gradients - parts
            assert 0 <= extra - (5 * 3200 * 8 + 3520 * 8) < 10 * 512
            assert not card.unpriced


class TestRecurrentNetworks:
    def forward(self, batch_first, batch_sizes=()):
        x, state = meta(8, 5, 24), meta(1, 8 if batch_first else 5, 32)
        weights = [meta(128, 24), meta(128, 32), meta(128), meta(128)]
        arguments = (
            x,
            weights,
            4,
            meta(7424),
            state,
            state,
            2,
            32,
            0,
            1,
            batch_first,
            0.0,
            True,
            False,
            batch_sizes,
            None,
        )
        return sizes(aten._cudnn_rnn.default, *arguments)

    def test_samples_first_are_laid_out_step_by_step(self):
        assert self.forward(False) == [[]]
        assert self.forward(True) == [[8 * 5 * 24 * 4]]

    def backward(self, stride=4, grad_hy=None, batch_first=True, mask=(True,) * 4):
        x, out, state = meta(8, 5, 24), meta(5, 8, 32).transpose(0, 1), meta(1, 8, 32)
        plain = (2, 32, 0, 1, batch_first, 0.0, True, False, (), None, meta(99), mask)
        arguments = (x, [], stride, meta(7424), state, state, out, meta(8, 5, 32), grad_hy, state, *plain)
        return sizes(aten._cudnn_rnn_backward.default, *arguments)

    def test_backward_copies_and_fills(self):
        state, x, gradient = 8 * 32 * 4, 8 * 5 * 24 * 4, 8 * 5 * 32 * 4
        assert self.backward() == [[state, x, gradient], [state, x]]
        assert self.backward(grad_hy=meta(1, 8, 32)) == [[x, gradient], [x]]

    def test_without_biases_gradients_are_copied_from_the_whole(self):
        assert self.backward(stride=2)[1][-1] == 7424 * 4
        assert self.backward(stride=2, mask=(True, True, True, False))[1][-1] == 8 * 5 * 24 * 4


class TestIndexPut:
    def test_without_accumulation(self):
        assert most(aten.index_put_.default, meta(9, 4), [meta(5, dtype=torch.int64)], meta(5, 4)) == 0

    def test_accumulation_sorts_int64(self):
        arguments = (meta(9, 4), [meta(5000, dtype=torch.int64)], meta(5000, 4), True)
        assert most(aten.index_put_.default, *arguments) == 4 * 5000 * 8 + sort_space(5000, 8, 8)

    def test_values_that_repeat_are_written_out(self):
        arguments = (meta(9, 4), [meta(5000, dtype=torch.int64)], meta(1, 4), True)
        assert 5000 * 4 * 4 in sizes(aten.index_put_.default, *arguments)[0]

    def test_masks_become_positions(self):
        mask = meta(100, 50, dtype=torch.bool)
        assert sizes(aten.index.Tensor, meta(100, 50), [mask]) == [[100 * 50 * 2 * 8]]
        assert sizes(aten.index_put_.default, meta(100, 50), [mask], meta()) == [[100 * 50 * 2 * 8]]


class TestSorting:
    def test_up_to_4096_in_place(self):
        assert most(aten.sort.default, meta(64, 4096)) == 0

    def test_one_slice(self):
        assert most(aten.sort.default, meta(10_000)) == 10_000 * 8 + sort_space(10_000, 4, 8)

    def test_some_slices_are_sorted_as_one(self):
        count = 16 * 5000
        expected = 2 * count * 8 + count * 4 + sort_space(count, 4, 8)
        assert most(aten.sort.stable, meta(16, 5000), stable=True) == expected

    def test_many_slices(self):
        count = 200 * 5000
        assert most(aten.sort.default, meta(200, 5000)) == count * 8 + count * 12

    def test_another_dimension_is_sorted_in_copies(self):
        count = 5000 * 200
        assert most(aten.sort.default, meta(5000, 200), 0) - most(aten.sort.default, meta(200, 5000)) == count * 16

    def test_topk_of_a_beam(self):
        """16 samples of 64 x 5120 candidates: 128 processors with 6 blocks of 256 threads, so 27 items a thread."""
        blocks = 16 * ceil(327_680 / (256 * ceil(16 * 327_680 / (128 * 6 * 256))))
        expected = 16 * 4 + 2 * 16 * 4 + 2 * 16 * 4 + blocks * (512 + 4 + 4)
        assert most(aten.topk.default, meta(16, 327_680), 64) == expected

    def test_topk_of_short_slices_needs_nothing(self):
        assert most(aten.topk.default, meta(16, 5120), 64) == 0

    def test_more_than_4096_results_are_sorted(self):
        assert most(aten.topk.default, meta(2, 19_999), 5000) == 10_000 * 20 + sort_space(10_000, 4, 8)

    def test_unique_keeps_positions_for_the_inverse(self):
        tensor = meta(100_000, dtype=torch.int64)
        assert most(aten._unique2.default, tensor) == 800_000 + sort_space(100_000, 8, 0)
        assert most(aten._unique2.default, tensor, True, True) == 3 * 800_000 + sort_space(100_000, 8, 8)


class TestUnique:
    def test_consecutive_elements(self):
        tensor = meta(1000, dtype=torch.int64)
        assert sizes(aten.unique_consecutive.default, tensor) == [[8]]
        assert sizes(aten.unique_consecutive.default, tensor, True) == [[4000, 8]]
        assert sizes(aten.unique_consecutive.default, meta(20, 50).t()) == [[4000, 8]]

    def test_rows_are_sorted_by_position(self):
        sort, inverse, counts = sizes(aten.unique_dim.default, meta(1000, 16), 0, True, True, True)
        assert (sort, inverse, counts) == ([8000, 8000], [8000, 8000], [8000, 8008])

    def test_columns_are_copied_first(self):
        sort, inverse, counts = sizes(aten.unique_dim.default, meta(16, 1000), 1)
        assert (sort, inverse, counts) == ([64_000, 8000, 8000], [64_000, 8000], [64_000, 8000])

    def test_consecutive_rows_are_not_sorted(self):
        assert sizes(aten.unique_consecutive.default, meta(1000, 16), False, False, 0) == [[8000]] * 3


@pytest.mark.parametrize(("arguments", "copies"), [((1,), 1), ((5,), 1), ((5, True), 3), ((1, True), 1)])
def test_multinomial(arguments, copies):
    assert most(aten.multinomial.default, meta(10, 1000), *arguments) == copies * 40_000


@pytest.mark.parametrize(("rows", "columns", "parts"), [(65_536, 64, 0), (100_000, 64, 3125), (100_000, 8192, 0)])
def test_layer_norm_backward_sums_twice_over_many_rows(rows, columns, parts):
    tensor = meta(rows, columns)
    expected = [parts * columns * 4] * 2 if parts else []
    assert sizes(aten.native_layer_norm_backward.default, tensor, tensor, [columns]) == [expected]


def test_group_norm():
    tensor, weight = meta(4, 8, 16, 16, dtype=torch.bfloat16), meta(8)
    by_channel, by_group = 4 * 8 * 4, 4 * 2 * 4
    assert sizes(aten.native_group_norm.default, tensor, weight, weight, 4, 8, 256, 2, 1e-5) == [[by_channel] * 2]
    backward = (tensor, tensor, meta(4, 2), meta(4, 2), weight, 4, 8, 256, 2, [True] * 3)
    assert sizes(aten.native_group_norm_backward.default, *backward) == [[by_channel] * 3 + [by_group] * 2]


@pytest.mark.parametrize("func", [aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default])
def test_reduced_losses_are_first_formed_by_element(func):
    assert most(func, meta(100, 10), meta(100, 10)) == 4000
    assert most(func, meta(100, 10), meta(100, 10), 0) == 0


def test_cross_entropy_with_logits():
    arguments = (meta(100, 10), meta(100, 10))
    assert most(aten.binary_cross_entropy_with_logits.default, *arguments) == 8000
    assert most(aten.binary_cross_entropy_with_logits.default, *arguments, None, meta(10)) == 12_000


@pytest.mark.parametrize(("reduction", "shape", "temporary"), [("mean", (), 4), ("sum", (), 4), ("none", (64, 100), 0)])
def test_a_cross_entropy_keeps_the_losses_by_element(reduction, shape, temporary):
    """Its result is copied over their first: as many bytes live as long as it does."""
    with vgpu.virtual_gpu(CARD) as card:
        values = torch.rand(64, 100, device="vgpu")
        for _ in range(2):  # what is cached of shapes does not tell
            before = torch.vgpu.memory_stats()["requested_bytes.all.current"]
            torch.vgpu.reset_peak_memory_stats()
            loss = F.binary_cross_entropy(values, values, reduction=reduction)
            assert loss.shape == shape
            stats = torch.vgpu.memory_stats()
            assert stats["requested_bytes.all.current"] - before == 64 * 100 * 4
            assert stats["requested_bytes.all.peak"] - before == 64 * 100 * 4 + temporary
            del loss
        assert not card.unpriced


def test_a_cross_entropys_backward_needs_nothing():
    with vgpu.virtual_gpu(CARD) as card:
        values = torch.rand(64, 100, device="vgpu").requires_grad_()
        loss = F.binary_cross_entropy(values, torch.rand(64, 100, device="vgpu"))
        before = torch.vgpu.memory_allocated()
        loss.backward()
        assert torch.vgpu.max_memory_allocated() - before == 64 * 100 * 4 + 512
        assert not card.unpriced


def test_log_sum_exp_holds_the_exponentials():
    assert most(aten.logsumexp.default, meta(64, 1000), [1]) == 256_000


def test_foreach_norm_has_a_chunk_for_every_65536_elements():
    assert most(aten._foreach_norm.Scalar, [meta(200_000), meta(10)]) == 2 * 4 * 4


class TestAttention:
    def test_flash_backward_accumulates_queries_in_float32(self):
        query, key = meta(2, 32, 1000, 128, dtype=torch.bfloat16), meta(2, 8, 1000, 128, dtype=torch.bfloat16)
        rows, expanded = 2 * 32 * 1024, 2 * 1000 * 32 * 128 * 2
        func = aten._scaled_dot_product_flash_attention_backward.default
        assert sizes(func, query, query, key, key) == [[rows * 4, rows * 128 * 4, expanded, expanded]]
        assert sizes(func, query, query, query, query) == [[rows * 4, rows * 128 * 4]]

    def test_flash_forward_splits_keys_where_queries_are_few(self):
        func = aten._scaled_dot_product_flash_attention.default
        query, key = meta(1, 8, 64, 128, dtype=torch.bfloat16), meta(1, 8, 8192, 128, dtype=torch.bfloat16)
        rows = 32 * 8 * 64  # of 256 half processors, 8 blocks fill all with 32 splits
        assert sizes(func, query, key, key) == [[rows * 4, rows * 128 * 4]]
        assert sizes(func, query, key, key, 0.1) == [[]]
        assert sizes(func, key, key, key) == [[]]

    def test_efficient_backward_of_float32(self):
        """Blocks of 64 x 64 queries and columns, each with 16 bytes of locks, and the product dO x O."""
        query = meta(2, 4, 1000, 64)
        rows = 2 * 4 * 1000
        product, workspace = attention_space.efficient_backward(query, query, query, (8, 9))
        assert product == [rows * 64 * 4, rows * 4]
        assert workspace == [rows * 4, 2 * 4 * 16 * (4 + 64 * 64) * 4]

    def test_efficient_backward_of_wide_half_heads_keeps_keys_and_values(self):
        query = meta(1, 2, 64, 128, dtype=torch.float16)
        (_, workspace) = attention_space.efficient_backward(query, query, query, (8, 9))
        assert workspace[1] == 2 * (2 * (4 + 64 * 64) + 64 * (128 + 128)) * 4
        (_, roomy) = attention_space.efficient_backward(query, query, query, (9, 0))
        assert roomy[1] == 2 * (4 + 128 * 128) * 4


def test_a_backward_of_silu_is_one_operator():
    """Formulas in place of CUDA's kernels would hold several tensors of its size."""
    with vgpu.virtual_gpu(CARD):
        device = torch.get_device_module("vgpu")
        values = torch.empty(2**20, device="vgpu", requires_grad=True)
        out = F.silu(values)
        before = device.memory_allocated()
        out.backward(torch.empty_like(out))
        assert device.max_memory_allocated() - before == 2 * 2**22


@pytest.mark.parametrize(("dtype", "converted"), [(torch.float16, 0), (torch.bfloat16, 1)])
def test_softmax_goes_from_half_to_float_in_one_kernel(dtype, converted):
    with vgpu.virtual_gpu(CARD):
        device = torch.get_device_module("vgpu")
        values = torch.empty(1024, 1024, dtype=dtype, device="vgpu")
        before = device.memory_allocated()
        F.log_softmax(values, dim=-1, dtype=torch.float32)
        assert device.max_memory_allocated() - before == (1 + converted) * 2**22


def test_what_has_no_entry_is_counted():
    with vgpu.virtual_gpu(CARD) as device:
        F.conv2d(torch.empty(1, 3, 8, 8, device="vgpu"), torch.empty(4, 3, 3, 3, device="vgpu"))
        assert dict(device.unpriced) == {"aten.convolution.default": 1}


def test_cub_space_is_that_of_two_buffers():
    assert sorting.radix_sort_bytes(10_000, 8, 8) == sort_space(10_000, 8, 8)
