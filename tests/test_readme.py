"""The README says what the repository does and what results/ holds."""

from __future__ import annotations

import re
from pathlib import Path

from bench.overrides import names_in
from bench.techniques.table import TECHNIQUES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_table_is_the_published_one() -> None:
    found = re.search(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", README, re.DOTALL)
    assert found is not None
    table = found[2].strip()
    assert table.count("\n") >= 3
    assert table in (ROOT / found[1]).read_text(encoding="utf-8")


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_it_names_every_workload_and_technique() -> None:
    for name in (*names_in("workload"), *TECHNIQUES):
        assert f"`{name}`" in README


def test_it_runs_the_sessions_that_exist() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    for session in re.findall(r"nox -s ([\w-]+)", README):
        assert f'"{session}"' in noxfile or f"def {session}(" in noxfile
