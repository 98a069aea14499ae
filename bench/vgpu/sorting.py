"""Memory that CUDA operators take which sort: cub's buffers and the tensors around them.

Sources, torch 2.13, below aten/src/ATen: cuda/cub.cuh and cub-RadixSortPairs.cuh (the wheel ships both), and the file
that each function names. cub allocates through `CUB_WRAPPER` from the caching allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from torch import Tensor

LONG = 8
"""Bytes of an int64 index."""

RADIX_DIGITS = 256
# Elements of a tile of cub's onesweep sort: 384 threads, 21 four-byte items each, fewer of wider keys (cub,
# dispatch/dispatch_radix_sort.cuh, policies of 8.0 and 9.0).
_TILE_THREADS, _TILE_ITEMS = 384, 21


def radix_sort_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """Temporary storage of cub::DeviceRadixSort between plain pointers, of more than one tile.

    A second buffer each for keys and values, one histogram of 64-bit counts per 8-bit digit, and the look-back of one
    32-bit count per digit value and tile.
    """
    items = max(1, _TILE_ITEMS * 4 // max(4, key_bytes, value_bytes))
    tiles = ceil(count / (_TILE_THREADS * items))
    return count * (key_bytes + value_bytes) + key_bytes * RADIX_DIGITS * 8 + tiles * RADIX_DIGITS * 4


def sort_phases(tensor: Tensor, dim: int) -> Sequence[Sequence[int]]:
    """`sort` along `dim`: nothing up to 4096 elements (native/cuda/Sort.cpp), else by number of slices (Sort.cu).

    A dimension that is not the innermost is sorted in copies.
    """
    length = tensor.size(dim) if tensor.dim() else 1
    if length <= 4096:
        return ()
    count, item = tensor.numel(), tensor.dtype.itemsize
    slices = count // length
    copies = [] if tensor.stride(dim) == 1 else [count * item, count * item, count * LONG]
    if slices == 1 or length >= 1_000_000:
        return ([*copies, length * LONG, radix_sort_bytes(length, item, LONG)],)
    if slices < 128:
        pairs = [count * LONG, count * LONG]
        return ([*copies, *pairs, count * item, radix_sort_bytes(count, item, LONG)],)
    return ([*copies, count * LONG, count * (item + LONG)],)


def topk_phases(tensor: Tensor, k: int, dim: int, multiprocessors: int, capability: tuple[int, int]) -> list[list[int]]:
    """`topk`: counters if several blocks share a slice (native/cuda/TensorTopK.cu), a sort of k > 4096 results."""
    length = tensor.size(dim) if tensor.dim() else 1
    slices = tensor.numel() // max(1, length)
    item = tensor.dtype.itemsize
    phases: list[list[int]] = []
    if _several_blocks(slices, length):
        registers = 131072 if capability == (3, 7) else 65536
        blocks_per_processor = registers // (40 * 256)
        items = ceil(length * slices / (multiprocessors * blocks_per_processor * 256))
        blocks = slices * ceil(length / (256 * min(64, max(4, items))))
        counters = [blocks * RADIX_DIGITS * 2, blocks * 4, blocks * 4]
        phases.append([slices * item, 2 * slices * 4, 2 * slices * max(4, item), *counters])
    if k > 4096:
        results = slices * k
        phases.append([results * item, results * LONG, results * LONG, radix_sort_bytes(results, item, LONG)])
    return phases


def _several_blocks(slices: int, length: int) -> bool:
    """should_use_multiblock (native/cuda/TensorTopK.cu)."""
    bounds = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    return length >= next((least for most, least in bounds if slices <= most), 400)


def unique_phases(tensor: Tensor, return_inverse: bool) -> Sequence[Sequence[int]]:
    """`_unique2` sorts a copy, with positions if it has to give the inverse (native/cuda/UniqueCub.cu)."""
    count, item = tensor.numel(), tensor.dtype.itemsize
    if not return_inverse:
        return ([count * item, radix_sort_bytes(count, item, 0)],)
    ordered = [count * item, count * LONG]
    return ([*ordered, count * LONG, radix_sort_bytes(count, item, LONG)], [*ordered, count * LONG])


def unique_consecutive_phases(tensor: Tensor, return_inverse: bool) -> Sequence[Sequence[int]]:
    """`unique_consecutive` of all elements: changes, as int32, that become the inverse (native/cuda/UniqueCub.cu)."""
    count = tensor.numel()
    copy_bytes = 0 if tensor.is_contiguous() else count * tensor.dtype.itemsize
    return ([copy_bytes, count * 4 * return_inverse, LONG],)


def unique_dim_phases(tensor: Tensor, dim: int, sorts: bool, inverse: bool, counts: bool) -> Sequence[Sequence[int]]:
    """`unique_dim`: a copy with the dimension in front, then positions: sorted, compared, counted.

    native/cuda/Unique.cu, unique_dim_cuda_template and compute_unique. thrust sorts by comparison with a second buffer
    of its keys; its partitions, one for every tile, are left out.
    """
    count = tensor.size(dim)
    moved = tensor.movedim(dim, 0)
    kept = [0 if moved.is_contiguous() else tensor.numel() * tensor.dtype.itemsize, count * LONG]
    return (
        [*kept, count * LONG * sorts],
        [*kept, count * LONG * inverse],
        [*kept, (count + 1) * LONG * counts],
    )


def index_put_phases(count: int, values_bytes: int) -> Sequence[Sequence[int]]:
    """`index_put` with accumulation sorts its linear index (native/cuda/Indexing.cu): that, sorted, positions, a range.

    Args:
        count: Indices.
        values_bytes: Of a copy of the values that lie expanded or not contiguous; 0: there is none.
    """
    return ([values_bytes, *[count * LONG] * 4, radix_sort_bytes(count, LONG, LONG)],)


def embedding_phases(
    indices: Tensor, gradient: Tensor, rows: int, by_frequency: bool, multiprocessors: int, release: tuple[int, int]
) -> Sequence[Sequence[int]]:
    """`embedding_dense_backward` sorts more than 3072 indices, then sums in float32 partial segments of ten rows each.

    native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu: a table row has a segment, and a segment one part more than
    it has whole tens, so that there are at most indices / 10 + min(indices, rows) parts, each as wide as the table.
    Since 2.11 (pull request 172454), few segments are summed by atomics and need no parts.
    """
    if indices.numel() <= 3072 and not by_frequency:
        return ()
    return _segment_phases(indices, gradient, rows, by_frequency, multiprocessors, release)


def embedding_bag_phases(
    indices: Tensor, gradient: Tensor, rows: int, by_frequency: bool, multiprocessors: int, release: tuple[int, int]
) -> Sequence[Sequence[int]]:
    """The backward of a bag's sum or mean sorts any number of indices, then sums as `embedding_phases` tells.

    native/cuda/EmbeddingBag.cu, embedding_bag_backward_cuda_sum_avg.
    """
    return _segment_phases(indices, gradient, rows, by_frequency, multiprocessors, release) if indices.numel() else ()


def _segment_phases(
    indices: Tensor, gradient: Tensor, rows: int, by_frequency: bool, multiprocessors: int, release: tuple[int, int]
) -> Sequence[Sequence[int]]:
    count, item, width = indices.numel(), indices.dtype.itemsize, gradient.size(-1)
    ordered = [count * item, count * item]
    sort = [*ordered, count * item, radix_sort_bytes(count, item, item)]
    segments = min(count, rows)
    parts = count // 10 + segments
    kept = [*ordered, count * item * by_frequency, count * item, segments * item, segments * item, parts * item]
    padded = ceil(width / 32) * 32
    blocks = ceil(segments * padded / min(padded, 1024))
    narrow = gradient.dtype.itemsize < 4
    if release >= (2, 11) and blocks < 4 * multiprocessors and parts > 4 * blocks:
        return (sort, [*kept, parts * item, rows * width * 4 * narrow])
    return (sort, [*kept, parts * width * max(4, gradient.dtype.itemsize)])
