"""From a composed configuration to a cell in which nothing is left open."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench import board
from bench.config import Cell, Job, Steps
from bench.errors import BadInput, OombenchError, Refused, unknown
from bench.frameworks import FRAMEWORKS, Framework, find_framework, framework_of, load
from bench.overrides import compose, names_in
from bench.record import Source

if typing.TYPE_CHECKING:
    from bench.targets import Target
    from bench.workload import Workload

DEFAULT_STEPS = {
    Source.PREDICTED: {"memory": 2, "warmup": 0, "timed": 1},
    Source.MEASURED: {"memory": 2, "warmup": 3, "timed": 10},
    Source.EMULATED: {"memory": 2, "warmup": 0, "timed": 1},
}
"""Steps where the configuration leaves them open: a card varies and warms up, the virtual one does neither."""

SOURCES = ("auto", *Source)
"""What `source=` can be; "auto" measures where the target's card is in this machine, else does what it can."""


def plan(overrides: Sequence[str]) -> Job:
    """The job that `key=value` words describe.

    Raises:
        BadInput: A word is wrong; the message names the nearest right one.
    """
    config = compose(overrides)
    cell = resolve(config)
    tree = _container(config)
    timeout_s = tree["timeout_s"]
    if not _is_number(timeout_s) or not 0 < timeout_s < math.inf:
        raise BadInput(f"timeout_s={timeout_s!r} is not a positive number of seconds")
    if not isinstance(tree["store"], str) or not tree["store"]:
        raise BadInput(f"store={tree['store']!r} is not a path")
    for name in ("trace", "explain"):
        if not isinstance(tree[name], bool):
            raise BadInput(f"{name}={tree[name]!r} is neither true nor false")
    job = Job(
        cell,
        label(cell),
        float(timeout_s),
        Path(tree["store"]),
        tree["trace"],
        tree["explain"],
        profile=_folder(tree, "profile"),
        tensorboard=_folder(tree, "tensorboard"),
    )
    _check_wishes(job)
    return job


def _check_wishes(job: Job) -> None:
    framework = find_framework(job.cell.framework)
    for name in set().union(*(other.wishes for other in FRAMEWORKS.values())) - framework.wishes:
        if getattr(job, name):
            raise BadInput(f"{name}: not with framework={framework.name}, which tells only {_listed(framework.wishes)}")
    if job.tensorboard is not None:
        board.check_installed()


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _folder(tree: Mapping[str, Any], name: str) -> Path | None:
    if tree[name] is not None and (not isinstance(tree[name], str) or not tree[name]):
        raise BadInput(f"{name}={tree[name]!r} is not a path")
    return None if tree[name] is None else Path(tree[name])


def resolve(config: Any) -> Cell:
    """Fill in everything that decides a cell's numbers, and check every word of it.

    What is cheap to check comes first, so that a bad word is answered before PyTorch is imported.
    """
    tree = _container(config)
    _check_steps(tree["steps"])
    if tree["source"] not in SOURCES:
        raise unknown("source", tree["source"], SOURCES)
    path = workload_path(tree["workload"], tree["framework"])
    target = find_target(tree["target"])
    workload = find_workload(path)
    framework = framework_of(workload)
    if tree["framework"] not in (None, framework.name):
        raise BadInput(f"{path} is written in {framework.name}, not in {tree['framework']}")
    preset, settings = _settings(workload, tree["workload"]["preset"], tree["workload"]["settings"])
    source = _source(tree["source"], target, framework)
    cell = Cell(
        workload=path,
        preset=preset,
        settings=settings,
        techniques=techniques(workload, tree["technique"]),
        target=target.name,
        source=source,
        steps=Steps(**{name: DEFAULT_STEPS[source][name] if n is None else n for name, n in tree["steps"].items()}),
        framework=framework.name,
    )
    refusal(cell)  # a refusal is for the caller to judge, wrong input is not
    return cell


def refusal(cell: Cell) -> str | None:
    """Why the workload cannot take one of the cell's techniques; None where it takes them all.

    Raises:
        BadInput: It could, but not with this value.
    """
    from bench.techniques import check, make_plan

    workload = find_workload(cell.workload)
    settings = dataclasses.replace(workload.presets[cell.preset], **cell.settings)
    try:
        check(make_plan(cell.techniques, cell.framework), workload, settings)
        find_framework(cell.framework).check_installed()
    except Refused as error:
        return str(error)
    return None


def workload_path(chosen: Mapping[str, Any], framework: Any) -> str:
    """The import path of the workload: the user's own, or that of a known one in the framework, else in its first."""
    if framework is not None:
        find_framework(framework)
    if chosen["path"] is not None:
        return str(chosen["path"])
    if not chosen["frameworks"]:
        raise BadInput(
            f"no workload: say workload={'|'.join(names_in('workload'))} or workload.path=package.module:Class"
        )
    if framework is None:
        return str(next(iter(chosen["frameworks"].values())))
    if framework not in chosen["frameworks"]:
        raise BadInput(f"this workload is not written in {framework}, but in {', '.join(chosen['frameworks'])}")
    return str(chosen["frameworks"][framework])


def techniques(workload: type[Workload], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Every technique's value: the chosen one, else the workload's baseline, else off.

    Raises:
        Refused: The framework lacks a chosen technique, which another one has.
    """
    from bench.techniques import techniques_of

    framework = framework_of(workload).name
    kinds = techniques_of(framework)
    for name in (*workload.baseline, *chosen):
        if name in kinds or chosen.get(name, ...) is None:
            continue
        if name in compose([]).technique:
            raise Refused(f"{workload.__name__} cannot take {name}={chosen[name]}: {framework} has no such technique")
        raise unknown("technique", name, kinds)
    values = {}
    for name, technique in kinds.items():
        value = chosen.get(name)
        values[name] = technique.parse(workload.baseline.get(name, technique.off) if value is None else value)
    return values


def find_workload(path: str) -> type[Workload]:
    """The workload class at `path`; a module that cannot be imported, for whatever reason, is bad input."""
    from bench.workload import load_workload

    try:
        return load_workload(path)
    except OombenchError:
        raise
    except Exception as error:
        raise BadInput(f"workload {path!r} cannot be imported: {type(error).__name__}: {_line(error)}") from error


def find_target(name: object) -> Target:
    """The target called `name`, an unknown one being bad input."""
    from bench import targets

    try:
        return targets.find_target(str(name))
    except ValueError as error:
        raise BadInput(str(error)) from error


def label(cell: Cell) -> str:
    """The cell in a few words: workload, preset, replaced settings, techniques other than the baseline's, target."""
    workload = find_workload(cell.workload)
    original = _fields(workload, cell.preset)
    plain = techniques(workload, {})
    changes = [f"{name}={value}" for name, value in cell.settings.items() if value != original[name]]
    changes += [f"{name}={value}" for name, value in cell.techniques.items() if value != plain[name]]
    short = cell.workload.partition(":")[0].rpartition(".")[2]
    written = [] if cell.framework == next(iter(FRAMEWORKS)) else [f"in {cell.framework}"]
    return " ".join([f"{short}/{cell.preset}", *written, *(changes or ["baseline"]), f"@ {cell.target}"])


def _container(config: Any) -> dict[str, Any]:
    try:
        return typing.cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise BadInput(f"configuration: {_line(error)}") from error


def _check_steps(values: Mapping[str, Any]) -> None:
    least = {"memory": 1, "warmup": 0, "timed": 1}
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least[name]:
            raise BadInput(f"steps.{name}={value!r} is not a whole number of at least {least[name]}")


def _source(word: str, target: Target, framework: Framework) -> Source:
    if word == framework.absent:
        return framework.absent
    if word in (Source.PREDICTED, Source.EMULATED):
        raise BadInput(f"source={word} with framework={framework.name}: its cells are {framework.absent} or measured")
    reason = why_not_measured(target, framework.name)
    if word == Source.MEASURED and reason is not None:
        raise BadInput(f"source=measured with target={target.name}: {reason}")
    return framework.absent if reason is not None else Source.MEASURED


def why_not_measured(target: Target, framework: str = "torch") -> str | None:
    """Why `target` cannot be measured here; None where it can."""
    if target.world_size > 1:
        return f"{target.name} is a group of {target.world_size} cards, which is only predicted"
    return typing.cast(str | None, load(find_framework(framework).obstacle)(target.title))


def _settings(workload: type[Workload], preset: Any, changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The preset's name, and its settings with `changes` made."""
    if not workload.presets:
        raise BadInput(f"{workload.__name__} has no presets")
    name = next(iter(workload.presets)) if preset is None else str(preset)
    if name not in workload.presets:
        raise unknown("preset", name, workload.presets)
    original = workload.presets[name]
    settings = _fields(workload, name)
    try:
        hints = typing.get_type_hints(type(original))
    except NameError:  # annotations that only a type checker can follow
        hints = {}
    for field, value in changes.items():
        if field not in settings:
            raise unknown("setting", field, [*settings, "path", "preset"])
        settings[field] = _typed(field, value, hints.get(field, Any))
    if settings["batch_size"] < 1:
        raise BadInput(f"workload.settings.batch_size={settings['batch_size']} is not a positive whole number")
    try:
        dataclasses.replace(original, **settings)
    except ValueError as error:  # settings that contradict each other
        raise BadInput(f"{workload.__name__}: {_line(error)}") from error
    return name, settings


def _fields(workload: type[Workload], preset: str) -> dict[str, Any]:
    """Every field of a preset, by name: plain values, as a record holds them and a cell is made of them again."""
    settings = workload.presets[preset]
    where = f"preset {preset!r} of {workload.__name__}"
    if not dataclasses.is_dataclass(settings) or not isinstance(getattr(settings, "batch_size", None), int):
        raise BadInput(f"{where} is no dataclass with a whole batch_size")
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    try:
        json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: {_line(error)}") from error
    return fields


def _typed(field: str, value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` wants it; annotations other than the plain ones are not checked."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_fit(field, value, arguments, hint)
    if origin is Literal:
        if value not in arguments:
            raise unknown(f"value of {field}", value, arguments)
        return value
    kind = origin or hint
    if kind is float and _is_number(value):
        return float(value)
    if kind in (tuple, list) and isinstance(value, list):
        return kind(value)
    if kind in (int, float, str, bool, tuple, list, types.NoneType) and type(value) is not kind:
        raise BadInput(f"workload.settings.{field}={value!r} is not of type {getattr(hint, '__name__', hint)}")
    return value


def _first_fit(field: str, value: Any, hints: Sequence[Any], union: Any) -> Any:
    for hint in hints:
        try:
            return _typed(field, value, hint)
        except BadInput:
            continue
    raise BadInput(f"workload.settings.{field}={value!r} is not of type {union}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
