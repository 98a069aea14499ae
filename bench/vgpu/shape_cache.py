"""FakeTensorMode with a shorter key to its cache of shape rules.

FakeTensorMode finds the outcome of an operator in a cache whose key holds some twenty properties of every tensor; to
make it takes longer than to use it (torch/_subclasses/fake_tensor.py, torch 2.13, `_cache_key`). Dense tensors of this
mode differ in six. What its own cache does not keep (views of unknown base, data-dependent shapes), this one does not
either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (  # type: ignore[attr-defined]
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    _CacheKeyState,
    _DispatchCacheValidEntry,
)

aten = torch.ops.aten

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_BY_STORAGE = frozenset({aten.as_strided.default, aten.set_.source_Storage_storage_offset})
"""Operators whose outcome also hangs on the size of a storage."""
_OVERSIZED = frozenset({aten.binary_cross_entropy.default})
"""Operators whose result lies in a larger storage, which a cache entry does not tell."""


class ShapeCachedMode(FakeTensorMode):
    """FakeTensorMode that remembers the entry of its cache by a short key."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._entries: dict[tuple[Any, ...], _DispatchCacheValidEntry | None] = {}
        self._state = _CacheKeyState(None)

    def _cached_dispatch_impl(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if func in _OVERSIZED:
            return self._dispatch_impl(func, types, args, kwargs)
        key = short_key(func, args, kwargs)
        if key is None:
            return super()._cached_dispatch_impl(func, types, args, kwargs)
        entry = self._entries.get(key)
        if entry is not None:
            return self._output_from_cache_entry(self._state, entry, None, func, args)  # type: ignore[arg-type]
        output = super()._cached_dispatch_impl(func, types, args, kwargs)
        if key not in self._entries:
            self._entries[key] = self._kept_entry(func, args, kwargs)
        return output

    def _kept_entry(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _DispatchCacheValidEntry | None:
        """What FakeTensorMode's cache has just kept for these arguments; None if nothing that can be used again."""
        try:
            entry = FakeTensorMode.cache.get(self._cache_key(_CacheKeyState(None), func, args, kwargs))
        except _BypassDispatchCache:
            return None
        return entry if isinstance(entry, _DispatchCacheValidEntry) else None


def short_key(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What decides the outcome of `func`; None where more than this does."""
    if func in _BY_STORAGE:
        return None
    parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    if not _add(parts, args):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _add(parts, (value,)):
            return None
    return tuple(parts)


def _add(parts: list[Any], values: Sequence[Any]) -> bool:
    """Append what counts of `values`; False where the short key does not cover one of them."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.dtype.is_complex or value.layout is not torch.strided:
                return False
            parts += (
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.fake_device,
                value.requires_grad,
            )
        elif kind in _PLAIN:
            parts += (kind, value)  # 1, 1.0 and True are equal, but promote differently
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            if not _add(parts, value):
                return False
        else:
            return False
    return True
