from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from snapshot_tools import Answer

from bench import cli, host


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, and a machine without a card."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(host, "cards", dict)
    return tmp_path


@pytest.fixture
def oombench(capsys: pytest.CaptureFixture[str], place: Path) -> Callable[..., Answer]:
    """The command line in this process; its workers are real processes."""

    def call(*arguments: str) -> Answer:
        status = cli.main(list(arguments))
        out, err = capsys.readouterr()
        return Answer(status, [line.rstrip() for line in out.splitlines()], err.splitlines())

    return call
