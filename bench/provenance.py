"""Where a record comes from: versions, code, host, commit, card, and when. No names of machines, no paths."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import host
from bench.config import Cell
from bench.record import Source

PACKAGES = ("oombench", "torch", "transformers")
"""Packages whose version a number can depend on."""


def provenance(cell: Cell) -> dict[str, Any]:
    """What to put beside the numbers of `cell`, now."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {**_fixed(), "code": code(cell.workload), "time": time}
    if cell.source is Source.MEASURED:
        facts["cards"] = [{"name": name, "driver": driver} for name, driver in host.cards().items()]
    return facts


@cache
def _fixed() -> dict[str, Any]:
    """The part that stays the same while this process lives."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        **_commit(),
    }


@cache
def code(workload: str) -> str:
    """16 hex digits that name the sources of bench, workloads and the package of `workload`, with or without git."""
    digest = hashlib.sha256()
    for package in sorted({"bench", "workloads", workload.partition(":")[0].partition(".")[0]}):
        for name, path in sorted(_sources(package).items()):
            digest.update(f"{package}/{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(package: str) -> dict[str, Path]:
    """The files of a package, or of a module, by name."""
    spec = find_spec(package)
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        return {package: Path(spec.origin)} if spec.has_location and spec.origin else {}
    return {
        path.relative_to(folder).as_posix(): path
        for folder in spec.submodule_search_locations
        for path in Path(folder).glob("**/*")
        if path.suffix in (".py", ".yaml", ".csv")
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> dict[str, Any]:
    """Commit of this code, and whether the code differs from it; nothing where it is not under git itself."""
    commit = _git("rev-parse", "HEAD")
    # An installed copy can lie inside somebody else's repository.
    if commit is None or _git("ls-files", "--error-unmatch", "bench/provenance.py") is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--", "bench", "workloads"))}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
