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
        *(f"k80/seq2seq_beam_thread{kind}" for kind in kinds),
        "k80/summary.md",
        *(f"rtx4090/maddpg_hopper_stock{kind}" for kind in kinds),
        *(f"rtx4090/seq2seq_beam_thread{kind}" for kind in kinds),
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


def test_the_preset_is_always_in_the_name(record, baselines):
    thread = record(9, 50)
    assert [section.stem for section in sections(tidy([thread], baselines))] == ["seq2seq_beam_thread"]
    other = {"batch_size": 16, "beam": 64, "source_length": 100}
    found = tidy([thread, record(4, 50, preset="tiny"), record(3, 50, preset="tiny", settings=other)], baselines)
    assert [section.stem for section in sections(found)] == [
        "seq2seq_beam_thread",
        "seq2seq_beam_tiny_source_length-100",
        "seq2seq_beam_tiny_source_length-472",
    ]


def test_what_an_earlier_publication_wrote_and_this_one_does_not_is_removed(record, baselines, tmp_path):
    thread, tiny = record(9, 50), record(4, 50, preset="tiny")
    before = publish([thread, tiny], tmp_path, baselines)
    inside = tmp_path / "rtx4090"
    foreign = [inside / name for name in ("seq2seq_beam_notes.md", "seq2seq_beam_tiny.txt", "cells.jsonl", "a.png")]
    for path in foreign:
        path.write_text("mine")
    after = publish([thread], tmp_path, baselines)
    gone = set(before) - set(after)
    assert len(gone) >= 3
    assert all("_tiny" in path.name for path in gone)
    assert sorted(inside.iterdir()) == sorted([*after, *foreign])


def test_a_plot_that_cannot_be_drawn_any_more_is_removed(record, baselines, tmp_path):
    before = publish([record(9, 50)], tmp_path, baselines)
    after = publish([record(status="refused", reason="no shards()")], tmp_path, baselines)
    assert {path.name for path in set(before) - set(after)} == {
        "seq2seq_beam_thread_memory.png",
        "seq2seq_beam_thread_pareto.png",
    }
    assert sorted((tmp_path / "rtx4090").iterdir()) == after


@pytest.mark.parametrize(
    "line", ["Every figure: [../a.md](../a.md), [../a.csv](../a.csv).", "See [a.md](a.md), [a.csv](a.csv)."]
)
def test_a_page_of_somebody_elses_removes_nothing(line, record, baselines, tmp_path):
    for folder in (tmp_path, tmp_path / "rtx4090"):
        folder.mkdir(exist_ok=True)
        (folder / "a.md").write_text("mine")
    (tmp_path / "rtx4090" / "summary.md").write_text(line)
    publish([record(9, 50)], tmp_path, baselines)
    assert (tmp_path / "a.md").exists()
    assert (tmp_path / "rtx4090" / "a.md").exists()


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
    assert [path.name for path in written] == ["seq2seq_beam_thread.csv", "seq2seq_beam_thread.md", "summary.md"]
    page = written[-1].read_text(encoding="utf-8")
    assert "- Fits (predicted): none." in page
    assert "- Cannot be applied (predicted): baseline (no shards())." in page


def test_no_records(baselines, tmp_path):
    assert publish([], tmp_path, baselines) == []
