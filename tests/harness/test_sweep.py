from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.card import bench_jobs
from bench.errors import BadInput
from bench.record import Source
from bench.sweep import load_sweep
from bench.targets import Target

SWEEP = """
card: k80
cells:
  - workload: fake_cells:Fake
    preset: tiny
    across:
      target: [k80, h100]
    each:
      precision: [fp32, fp16]
      clip: 1.0
    together:
      - {precision: fp32, accumulation: [1, 2]}
"""


def test_a_sweep_crosses_each_technique_and_those_together_with_the_rest(place: Path) -> None:
    (place / "mine.yaml").write_text(SWEEP)
    sweep = load_sweep("mine.yaml")
    assert (sweep.name, sweep.card, len(sweep.rows)) == ("mine", "k80", 2 * (1 + 3 + 2))
    labels = [job.label.removeprefix("fake_cells/tiny ") for job in sweep.jobs()]
    # accumulation=1 with precision=fp32 is precision=fp32 again.
    rows = ["baseline", "precision=fp32", "precision=fp16", "clip=1.0", "accumulation=2 precision=fp32"]
    assert labels == [f"{row} @ {target}" for target in ("k80", "h100") for row in rows]


def test_overrides_go_to_every_cell_of_a_sweep(place: Path) -> None:
    (place / "mine.yaml").write_text(SWEEP)
    jobs = load_sweep("mine.yaml").jobs(["target=v100_32", "steps.timed=5"])
    assert {(job.cell.target, job.cell.steps.timed) for job in jobs} == {("v100_32", 5)}
    assert len(jobs) == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("card: [", "is not YAML"),
        ("[]", "is not a mapping"),
        ("card: k80", "lacks a card or cells"),
        ("card: k80\ncels: []", "unknown sweep key 'cels': did you mean 'cells'?"),
        ("card: 4090\ncells: [{workload: x}]", "card is not a str"),
        ("card: k80\ncells: [{preset: tiny}]", "lacks its workload"),
        ("card: k80\ncells: [{workload: x, eech: {}}]", "did you mean 'each'?"),
        ("card: k80\ncells: [{workload: x, together: [bf16]}]", "is not a mapping of techniques"),
        (
            "card: k80\ncells: [{workload: fake_cells:Fake, each: {precison: bf16}}]",
            "did you mean 'technique.precision'?",
        ),
        ("card: k81\ncells: [{workload: fake_cells:Fake}]", "unknown target 'k81': did you mean 'k80'?"),
    ],
)
def test_a_wrong_sweep_is_answered_in_one_line(text: str, said: str, place: Path) -> None:
    (place / "mine.yaml").write_text(text)
    with pytest.raises(BadInput) as caught:
        load_sweep("mine.yaml").jobs()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_sweep_and_a_missing_file() -> None:
    with pytest.raises(BadInput, match="unknown sweep 'smok': did you mean 'smoke'"):
        load_sweep("smok")
    with pytest.raises(BadInput, match=r"^cannot read sweep file none\.yaml: No such file or directory$"):
        load_sweep("none.yaml")


def test_bench_predicts_where_the_card_is_not() -> None:
    said, jobs = bench_jobs("smoke", [])
    assert said.startswith("rtx4090 is not measured: no NVIDIA GeForce RTX 4090 in this machine; predicting")
    assert {job.cell.source for job in jobs} == {Source.PREDICTED}


def test_bench_measures_beside_predicting_where_the_card_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.host.why_not_measured", lambda title: None if "RTX 4090" in title else "no")
    said, jobs = bench_jobs("smoke", ["steps.timed=2"])
    measured = [job.cell for job in jobs if job.cell.source is Source.MEASURED]
    predicted = [job.cell for job in jobs if job.cell.source is Source.PREDICTED]
    assert said == f"rtx4090 is here: measuring {len(measured)} cells, predicting {len(predicted)} beside them"
    assert [cell.techniques for cell in measured] == [cell.techniques for cell in predicted]


def test_bench_of_a_card_without_a_sweep_runs_the_general_one_there() -> None:
    said, jobs = bench_jobs("k80", [])
    assert said.startswith("k80 is not measured")
    assert {job.cell.target for job in jobs} == {"k80"}
    assert {str(job.store) for job in jobs} == {"results/k80/cells.jsonl"}


def only_here(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target of that name be measured, and nothing else."""

    def reason(target: Target, *_: Any) -> str | None:
        return None if target.name == name else "not here"

    for module in ("resolve", "card"):
        monkeypatch.setattr(f"bench.{module}.why_not_measured", reason)


def test_bench_names_the_card_that_the_overrides_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    said, jobs = bench_jobs("smoke", ["target=k80"])
    assert said == "k80 is not measured: no Tesla K80 in this machine; predicting on the virtual GPU"
    assert {job.cell.target for job in jobs} == {"k80"}
    only_here("k80", monkeypatch)
    said, _ = bench_jobs("smoke", ["target=k80"])
    assert said.startswith("k80 is here: measuring")


def test_bench_names_every_card_of_a_sweep(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "mine.yaml").write_text(SWEEP)
    monkeypatch.setattr("bench.card._sweep_for", lambda card: (load_sweep("mine.yaml"), "k80"))
    only_here("h100", monkeypatch)
    said, _ = bench_jobs("mine", [])
    assert said == "h100 is here: measuring 5 cells, predicting 10 beside them"
    only_here(None, monkeypatch)
    said, _ = bench_jobs("mine", [])
    expected = "k80 is not measured: not here; h100 is not measured: not here; predicting on the virtual GPU"
    assert said == expected


def test_bench_local_is_this_machines_card(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="no accelerator in this machine"):
        bench_jobs("local", [])
    monkeypatch.setattr("bench.host.cards", lambda: {"NVIDIA Abacus": "1"})
    with pytest.raises(BadInput, match="no row for this machine's NVIDIA Abacus"):
        bench_jobs("local", [])
    monkeypatch.setattr("bench.host.cards", lambda: {"Tesla K80": "1"})
    with pytest.raises(BadInput, match="nothing can be measured on this machine's Tesla K80"):
        bench_jobs("local", [])
    monkeypatch.setattr("bench.host.why_not_measured", lambda title: None)
    said, jobs = bench_jobs("local", [])
    assert said.startswith("k80 is here: measuring")
    assert {job.cell.target for job in jobs} == {"k80"}


def test_bench_answers_wrong_words() -> None:
    with pytest.raises(BadInput, match="unknown card 'rtx409': did you mean 'rtx4090'"):
        bench_jobs("rtx409", [])
    with pytest.raises(BadInput, match="leave out source="):
        bench_jobs("4090", ["source=measured"])
