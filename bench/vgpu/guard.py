"""The device guard, and errors that would be lost in it.

torch 2.13 asks a Python device guard for its type while C++ unwinds from an error that Python raised (the autograd
engine's stream guard, torch/csrc/acc/Module.cpp). Calling Python with an error pending ends the process or loses the
error. So the guard takes the pending error off before it answers, and the engine's caller raises it again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_KIND = torch._C._autograd.DeviceType.PrivateUse1
_pending = ctypes.pythonapi.PyErr_Occurred  # ctypes raises an error that is pending after a call of the Python API
_pending.restype = ctypes.c_void_p
_kept: list[BaseException] = []


class Guard(torch._C._acc.DeviceGuard):
    """The device guard of the virtual GPU."""

    def type_(self) -> Any:
        """The device type; an error that is pending is kept for `engine_errors`."""
        try:
            _pending()
        except BaseException as error:
            _kept.append(error)
        return _KIND


@contextmanager
def engine_errors() -> Iterator[None]:
    """Let a backward raise what was raised in it."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_and_raise(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except SystemError:
            if not _kept:
                raise
            error = _kept[-1]
            _kept.clear()
            raise error from error.__cause__

    torch.autograd._engine_run_backward = run_and_raise  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
        _kept.clear()
