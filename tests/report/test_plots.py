from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from bench.report.frame import PARTS, rows, tidy
from bench.report.plots import COLOURS, fronts, memory_figure, pareto_figure, pareto_front
from bench.report.sheet import place, save

GIB = 2**30


def found(figure, gid):
    return figure.findobj(lambda artist: artist.get_gid() == gid)


def texts(figure, gid):
    return [artist.get_text() for artist in found(figure, gid)]


def test_every_fitting_configuration_is_a_point(tables):
    figure = pareto_figure(tables["both"])
    for source in ("measured", "predicted"):
        expected = {
            (row["allocated_bytes"] / GIB, row["items_per_s"])
            for row in rows(tables["both"])
            if row["source"] == source and row["status"] == "ok"
        }
        (points,) = found(figure, f"points-{source}")
        assert {tuple(point) for point in points.get_offsets().tolist()} == expected


def test_front_is_drawn_per_source(tables):
    figure = pareto_figure(tables["both"])
    assert fronts(rows(tables["both"])) == {
        "measured": ["accumulation=4", "precision=bf16"],
        "predicted": ["accumulation=4 + precision=bf16 + checkpointing=on", "batch_size=8", "precision=bf16"],
    }
    (line,) = found(figure, "front-predicted")
    assert line.get_xdata() == pytest.approx([2.1, 11.5, 13.2])
    assert line.get_drawstyle() == "steps-post"


def test_capacity_and_crosses(tables):
    figure = pareto_figure(tables["both"])
    (line,) = found(figure, "capacity")
    assert line.get_xdata()[0] == pytest.approx(23.52)
    (crosses,) = found(figure, "oom")
    assert [x for x, _ in crosses.get_offsets().tolist()] == pytest.approx([23.52, 23.52])
    key = " ".join(texts(figure, "key"))
    assert "sharing=none (OOM, measured and predicted)" in key
    assert "batch_size=32 (OOM, predicted)" in key


def test_every_mark_has_its_label(tables):
    figure = pareto_figure(tables["both"])
    assert sorted(texts(figure, "label")) == sorted(
        ["baseline"] * 2 + [str(n) for n in range(1, 15)] + ["5", "10"]  # measured as well
    )
    assert texts(figure, "footnote") == [
        "Not drawn: checkpointing=on + offload=activations (predicted, timeout), offload=states (predicted, crash), "
        "sharding=full (predicted, refused)."
    ]


def test_source_is_in_the_titles(tables):
    for draw in (pareto_figure, memory_figure):
        assert texts(draw(tables["both"]), "title")[0].endswith("(measured and predicted)")
        assert texts(draw(tables["small"]), "title")[0].endswith("(predicted)")


def test_a_far_capacity_is_a_remark(tables):
    for draw in (pareto_figure, memory_figure):
        figure = draw(tables["small"])
        assert not found(figure, "capacity")
        assert texts(figure, "card") == ["card: 23.52 GiB, off the scale →"]
        assert figure.axes[0].get_xlabel() == "peak allocated memory (MiB)"


def test_no_capacity_known(record, baselines):
    frame = tidy([record(9, 50), record(12, status="oom", clip=1.0)], baselines)
    assert not found(pareto_figure(frame), "card")
    (crosses,) = found(pareto_figure(frame), "oom")
    assert crosses.get_offsets().tolist()[0][0] == pytest.approx(13.2)
    assert not found(memory_figure(frame), "card")


def test_wide_ranges_are_logarithmic(record, baselines):
    frame = tidy([record(20, 5000), record(0.5, 20, clip=1.0)], baselines)
    (axes,) = pareto_figure(frame).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_bars_stack_to_the_peak(tables):
    (axes,) = memory_figure(tables["seq2seq"]).axes
    bars = [row for row in rows(tables["seq2seq"]) if row["allocated_bytes"]]
    assert [tick.get_text().replace("\n", " ") for tick in axes.get_yticklabels()] == [r["configuration"] for r in bars]
    for index, row in enumerate(bars):
        parts = [bar for bar in axes.patches if bar.get_y() < index < bar.get_y() + bar.get_height()]
        assert [bar.get_gid() for bar in parts] == [f"part-{part}" for part in PARTS[:-1]]
        assert sum(bar.get_width() for bar in parts) * GIB == pytest.approx(row["allocated_bytes"])
        assert all(bar.get_facecolor()[:3] == to_rgb(COLOURS[bar.get_gid()[5:]]) for bar in parts)
        assert all((bar.get_hatch() is not None) == (row["status"] == "oom") for bar in parts)


def test_totals_stand_at_the_bars(tables):
    totals = texts(memory_figure(tables["both"]), "total")
    assert totals[:2] == ["21.30 GiB", "21.40 GiB"]
    assert totals[-4:] == ["OOM at 22.90 GiB", "OOM at 22.95 GiB", "OOM at 23.10 GiB", "4.10 GiB (timeout)"]
    assert len(found(memory_figure(tables["both"]), "part-not split by the card")) == 4


def test_nothing_to_draw(record, baselines):
    frame = tidy([record(status="refused", reason="no")], baselines)
    assert pareto_figure(frame) is None
    assert memory_figure(frame) is None


@pytest.mark.parametrize("draw", [pareto_figure, memory_figure])
def test_files_are_reproducible(tables, tmp_path, draw):
    for name in ("a.png", "b.png"):
        save(draw(tables["both"]), tmp_path / name)
    data = (tmp_path / "a.png").read_bytes()
    assert data == (tmp_path / "b.png").read_bytes()
    assert b"Software" not in data
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1350
    assert 600 < height < 1300
    assert len(data) < 250_000


numbers = st.integers(0, 6).map(float)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=12))
def test_pareto_front_against_brute_force(points):
    beaten = {
        i
        for i, (memory, rate) in enumerate(points)
        for other_memory, other_rate in points
        if other_memory <= memory and other_rate >= rate and (other_memory, other_rate) != (memory, rate)
    }
    front = pareto_front(points)
    assert set(front) == set(range(len(points))) - beaten
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


coordinates = st.integers(0, 400).map(float)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(coordinates, coordinates), min_size=1, max_size=5))
def test_labels_are_placed_apart_where_there_is_room(spots):
    centres = place(spots, [(20.0, 12.0)] * len(spots), 4.0, [], (-200.0, -200.0, 600.0, 600.0))
    for i, (x, y) in enumerate(centres):
        for a, b in centres[i + 1 :]:
            assert max(0, 20 - abs(x - a)) * max(0, 12 - abs(y - b)) < 0.05 * 20 * 12
