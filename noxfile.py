"""Sessions: `nox -l` lists them.

All share one virtual environment, .nox/shared, so a fresh clone pays for one installation of PyTorch. It is installed
again when pyproject.toml changes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests", "lint"]
nox.options.default_venv_backend = "none"

SHARED = Path(".nox", "shared").resolve()
BIN = SHARED / ("Scripts" if os.name == "nt" else "bin")


def install(session: nox.Session) -> None:
    """Make the shared environment, unless it is there and as pyproject.toml wants it."""
    wanted = hashlib.sha256(Path("pyproject.toml").read_bytes()).hexdigest()
    stamp = SHARED / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    session.run(sys.executable, "-m", "venv", str(SHARED), external=True, silent=True)
    run(session, "python", "-m", "pip", "install", "--quiet", "-e", ".[test,perf,lint]")
    stamp.write_text(wanted)


def run(session: nox.Session, program: str, *arguments: str) -> None:
    """Run a program of the shared environment."""
    session.run(str(BIN / program), *arguments, external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no accelerator: nox -s tests -- tests/harness -k store"""
    install(session)
    run(session, "pytest", "-n", "auto", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, style, and strict types of bench and workloads."""
    install(session)
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "mypy")


@nox.session
def perf(session: nox.Session) -> None:
    """How long the harness itself takes: the benchmarks of tests/perf."""
    install(session)
    run(session, "pytest", "-o", "addopts=--quiet --strict-markers", "tests/perf", *session.posargs)


@nox.session(name="bench-4090")
def bench_4090(session: nox.Session) -> None:
    """What fits on an RTX 4090, into results/rtx4090: measured and predicted where there is one, else predicted."""
    install(session)
    run(session, "oombench", "bench", "4090", *session.posargs)


@nox.session(name="bench-h100")
def bench_h100(session: nox.Session) -> None:
    """The same for one H100, and for two nodes of four, which are always predicted."""
    install(session)
    run(session, "oombench", "bench", "h100", *session.posargs)


@nox.session(name="bench-local")
def bench_local(session: nox.Session) -> None:
    """Measure and predict on this machine's own accelerator; exit status 2 where there is none."""
    install(session)
    # nox would turn every failure into 1.
    status = subprocess.run([BIN / "oombench", "bench", "local", *session.posargs]).returncode
    if status:
        sys.exit(status)
