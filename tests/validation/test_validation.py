"""Predictions against published measurements: a row or more of each kind; `oombench validate` runs all."""

from __future__ import annotations

import json

import pytest

import bench.vgpu as vgpu
from bench.cli import main
from bench.validation import Outcome, Tolerance, published_rows, spreads, validate
from bench.validation.calibration import SOURCE_ROWS, bfloat16_flops_s, rtx4090_launch_s
from bench.validation.decoder_lm import SIZES, DecoderLm
from bench.validation.lm_step import Step
from bench.validation.outcome import quantile
from bench.validation.phases import phase_peaks

ROWS = {row.id: row for row in published_rows()}


def rows(*begins):
    return [row for row in ROWS.values() if row.id.startswith(begins)]


@pytest.mark.parametrize(
    "begin",
    [
        "attention_d16_l256",
        "cross_entropy_v4096",
        "rms_norm_h1024",
        "layer_norm_n1024",
        "llama_mlp_geglu_t1024",
        "empty_linear",
        "decoder_lm_small_step",
        "decoder_lm_small_ctx512",
        "decoder_lm_large_ctx512_fits",
        "bert_large_bs1x4_ckpt",
    ],
)
def test_predictions_hold(begin):
    outcomes = validate(rows(begin))
    assert outcomes
    assert [outcome.row.id for outcome in outcomes if not outcome.holds] == []


def test_memory_rows_come_out_as_printed():
    outcomes = validate(rows("attention_d64_l4096", "llama_mlp_geglu_t4096_full"))
    assert [outcome.error for outcome in outcomes if outcome.row.unit == "MiB"] == [0.0] * 5


def test_every_row_has_a_name_of_its_own_and_a_source():
    table = published_rows()
    assert len(table) == len(ROWS) == 75
    assert all(row.source and row.card and row.torch for row in table)


def test_figures_are_derived_from_rows_that_exist():
    assert set(ROWS) >= SOURCE_ROWS


@pytest.mark.parametrize(
    ("derive", "table"),
    [
        pytest.param(bfloat16_flops_s, lambda card: card.matmul_flops_s["bf16"], id="bf16 products"),
        pytest.param(rtx4090_launch_s, lambda card: card.launch_s, id="launches"),
    ],
)
def test_the_target_table_has_the_derived_figures(derive, table):
    card = vgpu.find_target("rtx4090")
    assert table(card) == pytest.approx(derive(card), rel=2e-3)


@pytest.mark.parametrize(
    ("text", "predicted", "measured", "holds"),
    [
        ("15 %", 115.0, 100.0, True),
        ("15 %", 115.1, 100.0, False),
        ("0.25 MiB", 10.2, 10.0, True),
        ("0.25 MiB", 9.7, 10.0, False),
        ("0.05 MiB or 6 digits", 65747.25, 65747.3, True),
        ("0.05 MiB or 6 digits", 65748.0, 65747.3, False),
        ("0.05 MiB or 6 digits", 16.8, 16.7505, True),
        ("exact", 1.0, 0.0, False),
        ("0", 8519680.0, 8519680.0, True),
    ],
)
def test_tolerances(text, predicted, measured, holds):
    assert Tolerance.parse(text).holds(predicted, measured) is holds


def test_a_tolerance_without_meaning_is_refused():
    with pytest.raises(ValueError, match="about right"):
        Tolerance.parse("about right")


def outcome(predicted, row_id="attention_d16_l4096_backward_peak", *, held_out=True):
    return Outcome(ROWS[row_id], "family", predicted, held_out)


def test_an_error_is_none_if_the_prediction_is_what_was_printed():
    assert outcome(4125.04).error == 0.0
    assert outcome(4083.75).error == pytest.approx(-0.01)


def test_a_prediction_of_what_does_not_fit_has_no_finite_error():
    assert outcome(1.0, "decoder_lm_large_ctx512_fits").error == float("inf")


def test_spreads_are_about_the_rows_held_out():
    outcomes = [outcome(4125.0 * (1 + error)) for error in (-0.02, 0.01, 0.04)] + [outcome(1.0, held_out=False)]
    (spread,) = spreads(outcomes)
    assert (spread.rows, spread.held_out, spread.too_low, spread.missed) == (4, 3, 1, 4)
    assert (spread.median, spread.p90, spread.worst) == pytest.approx((0.02, 0.04, 0.04))
    assert spread.lowest_by == pytest.approx(0.02)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.9, 4), (1.0, 4)])
def test_quantiles_are_values(share, expected):
    assert quantile([1, 2, 3, 4], share) == expected


def test_tables(capsys):
    assert main(["validate", "empty_linear"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split() == ["empty_linear_workspace", "8.51968e+06", "8.51968e+06", "B", "+0.00%", "0", "yes"]
    assert printed[-1].split()[:4] == ["workspace", "1", "0", "1"]


def test_json(capsys):
    assert main(["validate", "--json", "empty_linear"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert (row["predicted"], row["published"], row["holds"], row["held_out"]) == (8519680.0, 8519680.0, True, True)
    assert document["families"][0]["family"] == "workspace"


def test_a_miss_is_exit_status_1(capsys, monkeypatch):
    monkeypatch.setattr(Tolerance, "holds", lambda *values: False)
    assert main(["validate", "empty_linear"]) == 1
    assert "MISS" in capsys.readouterr().out


def test_no_row_is_a_usage_error(capsys):
    assert main(["validate", "nothing of the kind"]) == 2
    assert "unknown published row 'nothing of the kind'" in capsys.readouterr().err


def test_it_publishes(tmp_path, capsys):
    assert main(["validate", "empty_linear", "--into", str(tmp_path / "results")]) == 0
    page = (tmp_path / "results" / "accuracy.md").read_text()
    assert "| empty_linear_workspace | 8.51968e+06 | 8.51968e+06 | B" in page
    assert (tmp_path / "results" / "accuracy.csv").read_text().startswith("id,family,predicted,published")


def test_phase_peaks_of_a_small_model():
    found = phase_peaks(vgpu.find_target("h100"), Step("small", 128))
    weights = sum(parameter.numel() for parameter in DecoderLm(SIZES["small"], 128).parameters()) * 4
    assert found.out_of_memory is None
    assert list(found.peaks_bytes) == ["forward", "backward", "optimizer"]
    assert found.between_bytes == pytest.approx(4 * weights, rel=0.05)  # weights, gradients, two moments
    assert found.peaks_bytes["forward"] > 3 * weights  # gradients are cleared by then
    assert found.peaks_bytes["optimizer"] > 4 * weights


def test_phase_peaks_say_where_memory_ran_out():
    found = phase_peaks(vgpu.find_target("k80"), Step("large", 512))
    assert found.out_of_memory is not None
    assert "out of memory" in found.out_of_memory
