"""Who made an allocation, read from a snapshot: what the virtual GPU wrote there, else what the stack tells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from bench.show import printable
from bench.vgpu.attribution import UNKNOWN, Allocation

MAX_DEPTH = 1000  # frames of one stack that are looked at

_TORCH = re.compile(r"(?:^|/)(?:(?:site|dist)-packages/torch|bench/vgpu)/|^<|(?:^|/)contextlib\.py$")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_OPERATOR = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")
_MAKES_STORAGE = ("empty", "new_empty", "_empty", "resize", "_resize")  # under the operator that is meant


def made(entry: dict[str, Any], size_bytes: int) -> Allocation:
    """The allocation that a block or an event of a snapshot tells of."""
    return Allocation(
        size_bytes,
        _word(entry, "category") or UNKNOWN,
        _word(entry, "module") or UNKNOWN,
        _word(entry, "operator") or _operator(entry) or UNKNOWN,
        line_of(entry),
        "",
    )


def line_of(entry: dict[str, Any]) -> str:
    """`file:line in function` of the innermost Python frame outside torch."""
    if line := _word(entry, "line"):
        return line
    for frame in _frames(entry):
        file = frame.get("filename")
        if isinstance(file, str) and file.endswith(".py") and not _TORCH.search(file):
            return printable(f"{_short(file)}:{frame.get('line')!s:.12} in {frame.get('name')!s:.200}")
    return UNKNOWN


def _word(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    return printable(value) if isinstance(value, str) else ""


def _operator(entry: dict[str, Any]) -> str:
    """The operator in a stack of C++ frames, which only `stacks="all"` records."""
    for frame in _frames(entry):
        name = frame.get("name")
        found = _OPERATOR.search(name[:1000]) if isinstance(name, str) else None
        if found is not None and not found[1].startswith(_MAKES_STORAGE):
            return f"aten.{found[1]}"
    return ""


def _frames(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    frames = entry.get("frames")
    if isinstance(frames, list):
        yield from (frame for frame in islice(frames, MAX_DEPTH) if isinstance(frame, dict))


def _short(file: str) -> str:
    """The file as a reader knows it: below the installed packages, or below the current folder."""
    return _INSTALLED.sub("", file[:1000]).removeprefix(f"{Path.cwd()}/")
