from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cells import PATH
from harness_tools import job
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import host
from bench.config import Steps
from bench.errors import BadInput
from bench.frameworks import FRAMEWORKS
from bench.overrides import compose, expand, names_in, word
from bench.record import Source
from bench.resolve import plan, refusal, resolve
from bench.sweep import load_sweep
from bench.techniques import techniques_of
from bench.techniques.table import TECHNIQUES

exact = settings(derandomize=True, deadline=None, max_examples=60)
# "${" begins an interpolation, which is the configuration's to resolve.
texts = st.text(st.characters(exclude_characters="$", exclude_categories=["Cs", "Cc"]), max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.floats(-1e9, 1e9, width=32) | texts,
    lambda values: st.lists(values, max_size=3),
    max_leaves=5,
)


def test_a_cell_is_filled_in_from_the_preset_and_the_baseline() -> None:
    cell = job().cell
    assert (cell.workload, cell.preset, cell.target, cell.source) == (PATH, "normal", "rtx4090", Source.PREDICTED)
    assert cell.settings["batch_size"] == 8
    assert cell.techniques.keys() == TECHNIQUES.keys()
    assert cell.techniques["precision"] == "bf16"
    assert all(cell.techniques[name] == kind.off for name, kind in TECHNIQUES.items() if name != "precision")
    assert cell.steps == Steps()


def test_overrides_reach_every_part_of_a_cell() -> None:
    made = job(
        "workload.preset=tiny",
        "workload.settings.rate=2",
        "workload.widths=[1,2,3]",
        "workload.name=x",
        "technique.precision=fp32",
        "technique.accumulation=2",
        "target=k80",
        "steps.timed=3",
        "timeout_s=7",
        "store=a/b.jsonl",
        "trace=true",
    )
    cell = made.cell
    assert cell.preset == "tiny"
    assert cell.settings | {"rate": 2.0, "widths": (1, 2, 3), "name": "x", "batch_size": 2} == cell.settings
    assert type(cell.settings["rate"]) is float
    assert (cell.techniques["precision"], cell.techniques["accumulation"]) == ("fp32", 2)
    assert (cell.target, cell.steps) == ("k80", Steps(timed=3))
    assert (made.timeout_s, made.store, made.trace) == (7.0, Path("a/b.jsonl"), True)


def test_the_store_is_the_targets_own_by_default() -> None:
    assert job("target=h100").store == Path("results/h100/cells.jsonl")


def test_a_technique_set_to_null_is_the_baselines() -> None:
    assert job("technique.precision=null").cell == job().cell


def test_the_key_names_what_decides_the_numbers_and_nothing_else() -> None:
    key = job().cell.key
    same = ["timeout_s=1", "store=x", "trace=true", "workload.rate=0.5", "technique.precision=bf16"]
    other = ["workload.rate=0.25", "workload.preset=tiny", "technique.clip=1", "target=k80", "steps.memory=3"]
    assert {job(override).cell.key for override in same} == {key}
    assert len({key, *(job(override).cell.key for override in other)}) == 1 + len(other)


def test_a_workload_can_be_named_by_its_path() -> None:
    assert compose([f"workload={PATH}"]).workload.path == PATH
    assert plan([f"workload={PATH}"]).cell == plan([f"workload.path={PATH}"]).cell


def test_a_label_tells_what_differs_from_the_baseline() -> None:
    assert job().label == "fake_cells/normal baseline @ rtx4090"
    changed = job("workload.rate=2", "technique.precision=fp32", "workload.preset=tiny")
    assert changed.label == "fake_cells/tiny rate=2.0 precision=fp32 @ rtx4090"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tecnique.precision=bf16", "unknown override 'tecnique.precision': did you mean 'technique.precision'?"),
        ("technique.precison=bf16", "did you mean 'technique.precision'?"),
        ("technique.precision=bf61", "did you mean 'bf16'?"),
        ("technique.checkpointing=onn", "did you mean 'on'?"),
        ("technique.batch_size=0", "technique batch_size takes a positive whole number, not 0"),
        ("technique=bf16", "unknown override 'technique'"),
        ("workload=sek2seq_beam", "unknown workload 'sek2seq_beam': did you mean 'seq2seq_beam'?"),
        ("workload.path=fake_cells", "not of the form package.module:Class"),
        ("workload.path=fake_cells:Fak", "no workload at 'fake_cells:Fak'"),
        ("workload.path=fake_sells:Fake", "No module named 'fake_sells'"),
        ("workload.path=fake_cells:Broken", "fake_cells:Broken is not a workload: it lacks baseline"),
        ("workload.path=broken_module:Fake", "'broken_module:Fake' cannot be imported: ZeroDivisionError"),
        ("workload.path=fake_cells:NoPresets", "NoPresets has no presets"),
        (
            "workload.path=fake_cells:DictPresets",
            "preset 'only' of DictPresets is no dataclass with a whole batch_size",
        ),
        (
            "workload.path=fake_cells:NestedPresets",
            "preset 'only' of NestedPresets: Object of type FakeSettings is not",
        ),
        ("workload.preset=tny", "unknown preset 'tny': did you mean 'tiny'?"),
        ("workload.prest=tiny", "unknown setting 'prest': did you mean 'preset'?"),
        ("workload.settings.rat=1", "unknown setting 'rat': did you mean 'rate'?"),
        ("workload.batch_size=2.5", "workload.settings.batch_size=2.5 is not of type int"),
        ("workload.batch_size=true", "workload.settings.batch_size=True is not of type int"),
        ("workload.batch_size=0", "workload.settings.batch_size=0 is not a positive whole number"),
        ("workload.rate=fast", "workload.settings.rate='fast' is not of type float"),
        ("workload.rate=-1", "Fake: rate is below zero"),
        ("workload.mode=fanzy", "unknown value of mode 'fanzy': did you mean 'fancy'?"),
        ("workload.widths=3", "workload.settings.widths=3 is not of type"),
        ("workload.name=3", "workload.settings.name=3 is not of type"),
        ("target=rtx409", "unknown target 'rtx409': did you mean 'rtx4090'?"),
        ("source=predict", "unknown source 'predict': did you mean 'predicted'?"),
        ("source=measured", "source=measured with target=rtx4090: no NVIDIA GeForce RTX 4090 in this machine"),
        ("technique.accumulation=3", "not divisible by accumulation 3"),
        ("steps.memory=0", "steps.memory=0 is not a whole number of at least 1"),
        ("steps.timed=two", "steps.timed='two' is not a whole number"),
        ("step.timed=2", "did you mean 'steps.timed'?"),
        ("timeout_s=0", "timeout_s=0 is not a positive number of seconds"),
        ("timeout_s=inf", "timeout_s=inf is not a positive number of seconds"),
        ("timeout_s=nan", "timeout_s=nan is not a positive number of seconds"),
        ("store=null", "store=None is not a path"),
        ("store=''", "store='' is not a path"),
        ("trace=maybe", "trace='maybe' is neither true nor false"),
        ("store=${nothing}", "configuration:"),
        ("target", "'target' is not an override of the form key=value"),
        ("+target=k80", "leave out +, ~ and @"),
        ("~target", "leave out +, ~ and @"),
        ("hydra.run.dir=x", "unknown override 'hydra.run.dir'"),
        ("target=k80,h100", "'target=k80,h100' sweeps over several values: add --multirun"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line_with_the_right_one(override: str, said: str, place: Path) -> None:
    (place / "broken_module.py").write_text("1 / 0")
    pytest.MonkeyPatch().syspath_prepend(place)
    with pytest.raises(BadInput) as caught:
        job(override)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_workload_is_asked_for_by_the_known_names() -> None:
    with pytest.raises(BadInput, match=r"workload=fsdp_transformer\|maddpg_hopper\|seq2seq_beam"):
        plan(["target=k80"])


def test_what_a_workload_cannot_take_has_a_reason() -> None:
    assert refusal(job().cell) is None
    reason = refusal(job("technique.checkpointing=on").cell)
    assert reason is not None
    assert "Fake cannot take checkpointing=on" in reason


def test_auto_measures_where_the_card_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan([f"workload={PATH}"]).cell.source is Source.PREDICTED
    monkeypatch.setattr("bench.host.why_not_measured", lambda title: None)
    assert plan([f"workload={PATH}"]).cell.source is Source.MEASURED
    assert plan([f"workload={PATH}", "target=h100_2x4"]).cell.source is Source.PREDICTED


def test_a_card_is_measured_only_where_pytorch_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cards", lambda: {"Tesla K80": "470.1"})
    monkeypatch.setattr(torch.version, "cuda", None)
    assert host.why_not_measured("Tesla K80") == "this build of PyTorch has no CUDA"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert host.why_not_measured("Tesla K80") == "PyTorch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert host.why_not_measured("Tesla K80") is None
    assert host.why_not_measured("Tesla V100") == "no Tesla V100 in this machine (it has Tesla K80)"


def test_multirun_expands_the_product() -> None:
    words = ["workload=seq2seq_beam", "technique.batch_size=1,2", "steps.timed=range(1,4)", "target=k80"]
    combinations = list(expand(words))
    assert len(combinations) == 6
    assert combinations[1] == ["workload=seq2seq_beam", "technique.batch_size=1", "steps.timed=2", "target=k80"]
    assert [compose(combination).steps.timed for combination in combinations] == [1, 2, 3, 1, 2, 3]


def test_multirun_of_an_interval_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot expand"):
        list(expand(["timeout_s=interval(1,2)"]))


@exact
@given(plain)
def test_a_value_written_as_an_override_comes_back(value: Any) -> None:
    assert compose([word("workload.settings.x", value)]).workload.settings.x == value


def test_the_configuration_and_the_techniques_have_the_same_names() -> None:
    named = [name for framework in FRAMEWORKS for name in techniques_of(framework)]
    assert set(compose([]).technique) == set(named)


def test_what_two_frameworks_both_have_says_the_same() -> None:
    torch, tensorflow = (techniques_of(framework) for framework in ("torch", "tensorflow"))
    for name in torch.keys() & tensorflow.keys():
        assert (torch[name].off, torch[name].fidelity, torch[name].hook, torch[name].field) == (
            (tensorflow[name].off, tensorflow[name].fidelity, tensorflow[name].hook, tensorflow[name].field)
        )
    assert torch["precision"].words == tensorflow["precision"].words  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", names_in("workload"))
def test_every_workload_resolves_by_name(name: str) -> None:
    cell = resolve(compose([f"workload={name}"]))
    assert cell.workload.startswith(f"workloads.{name}:")
    assert cell.techniques.keys() == TECHNIQUES.keys()


@pytest.mark.parametrize(("name", "least"), [("4090", 45), ("h100", 45), ("smoke", 6)])
def test_the_sweeps_resolve_to_distinct_cells_with_their_baselines(name: str, least: int) -> None:
    jobs = load_sweep(name).jobs()
    assert len(jobs) >= least
    assert len({made.cell.key for made in jobs}) == len(jobs)
    crossed = {(made.cell.workload, made.cell.preset, made.cell.target) for made in jobs}
    plain_cells = {
        (made.cell.workload, made.cell.preset, made.cell.target) for made in jobs if "baseline" in made.label
    }
    assert plain_cells == crossed
