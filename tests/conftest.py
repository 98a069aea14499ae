"""One flag and one fixture for files that hold expected output."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write the golden files instead of comparing them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file in `golden/` beside the test; `--refresh-golden` writes the file first."""
    folder = request.path.parent / "golden"

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--refresh-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        assert path.exists(), f"no {path.name}: run pytest with --refresh-golden and read what it writes"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: --refresh-golden, if that is meant"

    return check
