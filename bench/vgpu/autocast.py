"""Autocast for the virtual GPU, with the operator lists that CUDA has.

Lists: aten/src/ATen/autocast_mode.h, torch 2.13 (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE, AT_FORALL_PROMOTE). Casts of float32 leaves that
require a gradient are kept until the outermost autocast ends, as `cached_cast` does: a weight used twice is cast once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def _names(text: str) -> list[str]:
    return text.split()


LOWER_PRECISION = _names(
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul "
    "einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention"
)
FLOAT32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
FLOAT32_OUTPUT = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
FLOAT32_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")

_KEY = "AutocastPrivateUse1"
_exclude = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_libraries: list[torch.library.Library] = []
_casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


def install() -> None:
    """Register the lists, and a fallthrough for every other operator; a second call does nothing."""
    if _libraries:
        return
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    lists = torch.library.Library("aten", "IMPL")
    for names, rule in (
        (LOWER_PRECISION, _lower),
        (FLOAT32, _float32),
        (FLOAT32_OUTPUT, _float32_output),
        (PROMOTE, _promote),
    ):
        for name in names:
            lists.impl(name, rule(_overload(name)), _KEY)
    for name, full in FLOAT32_APPENDED.items():
        lists.impl(name, _float32_appended(_overload(full)), _KEY)
    lists.impl("binary_cross_entropy", _refused, _KEY)
    _libraries.extend((everything, lists))


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def _castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64 and _on_card(value)


def _on_card(tensor: Tensor) -> bool:
    return tensor.device.type == "vgpu"


def cached_cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` in `dtype`, tensors inside lists too; weights from the cache."""
    if isinstance(value, list | tuple):
        return type(value)(cached_cast(item, dtype) for item in value)
    if not _castable(value) or value.dtype == dtype:
        return value
    keep = (
        torch.is_autocast_cache_enabled()
        and dtype == torch.get_autocast_dtype("vgpu")
        and value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
    )
    if not keep:
        return value.to(dtype)
    known = _casts.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    cast = value.to(dtype)
    _casts[id(value)] = (weakref.ref(value), cast)
    return cast


def _with_dtype(op: OpOverload, choose: Callable[[tuple[Any, ...]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_exclude):
            dtype = choose(args)
            cast = [cached_cast(value, dtype) for value in args]
            return op(*cast, **{name: cached_cast(value, dtype) for name, value in kwargs.items()})

    return kernel


def _lower(op: OpOverload) -> Callable[..., Any]:
    return _with_dtype(op, lambda args: torch.get_autocast_dtype("vgpu"))


def _float32(op: OpOverload) -> Callable[..., Any]:
    return _with_dtype(op, lambda args: torch.float32)


def _float32_output(op: OpOverload) -> Callable[..., Any]:
    """Operators with a dtype argument: ask for a float32 result unless the caller asked for something."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_exclude):
            names = [argument.name for argument in op._schema.arguments]
            asked = kwargs.get("dtype") or (args[names.index("dtype")] if "dtype" in names[: len(args)] else None)
            half = _castable(args[0]) and args[0].dtype in (torch.float16, torch.bfloat16)
            if asked is None and half:
                args = args[: names.index("dtype")]
                kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _float32_appended(op: OpOverload) -> Callable[..., Any]:
    """Norms, which are called with the type of their result as one more argument."""

    def kernel(tensor: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
        rest = () if dim is None else (dim, keepdim)
        with torch._C._ExcludeDispatchKeyGuard(_exclude):
            return op(tensor, p, *rest, dtype=torch.float32 if _castable(tensor) else tensor.dtype)

    return kernel


def _refused(*args: Any, **kwargs: Any) -> Any:
    """binary_cross_entropy in torch's own words.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )


def _promote(op: OpOverload) -> Callable[..., Any]:
    """Operators of several tensors: the widest floating type among them."""

    def widest(args: tuple[Any, ...]) -> torch.dtype:
        tensors = [value for value in args if _castable(value)]
        tensors += [item for value in args if isinstance(value, list | tuple) for item in value if _castable(item)]
        wide = any(tensor.dtype == torch.float32 for tensor in tensors)
        return torch.float32 if wide else torch.get_autocast_dtype("vgpu")

    return _with_dtype(op, widest)


@contextmanager
def cast_cache() -> Iterator[None]:
    """Let the end of the outermost autocast clear the kept casts, as it clears CUDA's."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _casts.clear()
        clear()

    torch.clear_autocast_cache = clear_both
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear
        _casts.clear()
