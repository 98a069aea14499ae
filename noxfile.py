"""Sessions: `nox -l` lists them.

Two virtual environments: .nox/shared for all that needs PyTorch only, .nox/tensorflow for what needs TensorFlow too.
Each is installed when it is first needed, and again when pyproject.toml changes.
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

EXTRAS = {"shared": "test,perf,lint", "tensorflow": "test,tf"}
"""The environments, and what each has."""


def program(environment: str, name: str) -> str:
    """Where a program of an environment stands."""
    # Not resolved: the environment's python is a link to the one that it was made from.
    return str(Path(".nox", environment, "Scripts" if os.name == "nt" else "bin", name).absolute())


def install(session: nox.Session, environment: str = "shared") -> None:
    """Make an environment, unless it is there and as pyproject.toml wants it."""
    wanted = hashlib.sha256(Path("pyproject.toml").read_bytes()).hexdigest()
    folder = Path(".nox", environment)
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    session.run(sys.executable, "-m", "venv", str(folder), external=True, silent=True)
    extras = EXTRAS[environment]
    run(session, "python", "-m", "pip", "install", "--quiet", "-e", f".[{extras}]", environment=environment)
    stamp.write_text(wanted)


def run(session: nox.Session, name: str, *arguments: str, environment: str = "shared") -> None:
    """Run a program of an environment."""
    session.run(program(environment, name), *arguments, external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no accelerator, those of TensorFlow too; or some: nox -s tests -- tests/harness -k store"""
    chosen = session.posargs
    if not chosen or not any("tests/tf" in word for word in chosen):
        install(session)
        run(session, "pytest", "-n", "auto", *chosen)
    if not chosen or any("tests/tf" in word for word in chosen):
        install(session, "tensorflow")
        run(session, "pytest", "-n", "auto", *(chosen or ["tests/tf"]), environment="tensorflow")


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
    install(session, "tensorflow")
    run(session, "oombench", "bench", "4090", *session.posargs, environment="tensorflow")


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
    status = subprocess.run([program("shared", "oombench"), "bench", "local", *session.posargs]).returncode
    if status:
        sys.exit(status)
