from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness_tools import Answer, Command

from bench import cli, host, runner


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for every test, a machine without a card, and fake cells in the workers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(host, "cards", dict)
    monkeypatch.setattr(runner, "RUN_CELL", "fake_cells:run_cell")
    return tmp_path


@pytest.fixture
def oombench(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process; its workers are real processes."""

    def call(*arguments: str) -> Answer:
        status = cli.main(list(arguments))
        out, err = capsys.readouterr()
        return Answer(status, out.splitlines(), err.splitlines())

    return call
