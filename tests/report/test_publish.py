from __future__ import annotations

import re

import pytest

from bench.report.frame import rows, tidy
from bench.report.publish import fastest, publish, sections, smallest, summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def written(records, baselines, capacities, folder):
    return publish([*records["both"], *records["small"], *records["baseline_oom"]], folder, baselines, capacities)


def test_files(written, folder):
    kinds = [".csv", ".md", "_memory.png", "_pareto.png"]
    assert [path.relative_to(folder).as_posix() for path in written] == [
        *(f"k80/seq2seq_beam{kind}" for kind in kinds),
        "k80/summary.md",
        *(f"rtx4090/maddpg_hopper{kind}" for kind in kinds),
        *(f"rtx4090/seq2seq_beam{kind}" for kind in kinds),
        "rtx4090/summary.md",
    ]


def test_links_lead_somewhere(written):
    for page in [path for path in written if path.name == "summary.md"]:
        links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        assert len(links) >= 4
        assert all((page.parent / link).is_file() for link in links)


def test_summary_golden(written, golden):
    for page in [path for path in written if path.name == "summary.md"]:
        golden(f"summary_{page.parent.name}.md", page.read_text(encoding="utf-8"))


def test_preset_is_in_the_name_only_where_there_are_several(record, baselines):
    one = tidy([record(9, 50)], baselines)
    assert [section.stem for section in sections(one)] == ["seq2seq_beam"]
    other = {"batch_size": 16, "beam": 64, "source_length": 100}
    two = tidy([record(9, 50), record(4, 50, preset="tiny"), record(3, 50, preset="tiny", settings=other)], baselines)
    assert [section.stem for section in sections(two)] == [
        "seq2seq_beam_thread",
        "seq2seq_beam_tiny_source_length-100",
        "seq2seq_beam_tiny_source_length-472",
    ]


def test_fastest_is_per_item(record, baselines):
    found = rows(tidy([record(9, 50, items=100), record(5, 30, items=50, batch_size=8)], baselines))
    assert fastest(found)["configuration"] == "baseline"
    assert smallest(found)["configuration"] == "batch_size=8"
    assert fastest([]) is None
    assert smallest([]) is None


def test_a_choice_that_keeps_the_gradient_is_named_apart(record, baselines):
    frame = tidy([record(9, 50), record(5, 30, clip=1.0, gradient="changes training")], baselines)
    page = summary(sections(frame))
    assert re.search(r"\| fastest that fits +\| clip=1 ", page)
    assert re.search(r"\| fastest with the same gradient +\| baseline ", page)
    assert "![" not in page


def test_nothing_fits(record, baselines, tmp_path):
    written = publish([record(status="refused", reason="no shards()")], tmp_path, baselines)
    assert [path.name for path in written] == ["seq2seq_beam.csv", "seq2seq_beam.md", "summary.md"]
    page = written[-1].read_text(encoding="utf-8")
    assert "- Fits (predicted): none." in page
    assert "- Cannot be applied (predicted): baseline (no shards())." in page


def test_no_records(baselines, tmp_path):
    assert publish([], tmp_path, baselines) == []
