"""The folder where a command is given, as a place of the user's own code."""

from __future__ import annotations

import sys
from pathlib import Path


def cwd_on_path() -> None:
    """Let a workload class of the user's be found where the command is given."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
