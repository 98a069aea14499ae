"""From `key=value` words to a configuration: Hydra's grammar and groups, with errors that name the right word."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.errors import BadInput, unknown


def names_in(group: str) -> list[str]:
    """The files of a configuration group, without their suffix."""
    folder = files("bench.conf").joinpath(group)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def compose(overrides: Sequence[str]) -> Any:
    """The configuration of one cell, as an OmegaConf tree.

    Raises:
        BadInput: A word is no override, sweeps over several values, or has a key or a workload that does not exist.
    """
    parsed = [_parse(word) for word in overrides]
    for override in parsed:
        if override.is_sweep_override():
            raise BadInput(f"{override.input_line!r} sweeps over several values: add --multirun")
    choice = next((override.value() for override in reversed(parsed) if _key(override) == "workload"), None)
    config = copy.deepcopy(_base(_workload_group(choice)))
    if choice is not None and ":" in str(choice):
        config.workload.path = choice
    for override in parsed:
        if (key := _key(override)) != "workload":
            _update(config, key, override)
    return config


def expand(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Every combination of overrides that sweep over values (`a,b`, `range(1,5)`), as lists for `compose`."""
    choices = []
    for word in overrides:
        override = _parse(word)
        if override.is_sweep_override():
            key = override.get_key_element()
            try:
                choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
            except (HydraException, AttributeError) as error:
                raise BadInput(f"cannot expand {word!r}: {_line(error)}") from error
        else:
            choices.append([word])
    for combination in itertools.product(*choices):
        yield list(combination)


def word(key: str, value: Any) -> str:
    """The override that sets `key` to a plain Python value."""
    return f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return str(QuotedString(value, Quote.single).with_quotes())
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    return str(value)


@cache
def _parse(text: str) -> Any:
    """Hydra's reading of one word, its key checked."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise BadInput(f"{text!r} is not an override of the form key=value") from error
    if override.is_add() or override.is_delete() or override.package is not None:
        raise BadInput(f"{text!r} is not an override of the form key=value: leave out +, ~ and @")
    _key(override)
    return override


def _key(override: Any) -> str:
    """The configuration key that an override means; `workload.<field>` is short for `workload.settings.<field>`."""
    key = str(override.key_or_group)
    known = _known_keys()
    if key in known or (key.startswith("workload.settings.") and key.count(".") == 2):
        return key
    group, _, field = key.partition(".")
    if group == "workload" and field and "." not in field:
        return f"workload.settings.{field}"
    raise unknown("override", key, known)


@cache
def _known_keys() -> tuple[str, ...]:
    keys = ["workload"]
    for name, value in OmegaConf.to_container(_base(None)).items():
        keys.extend(f"{name}.{leaf}" for leaf in value) if isinstance(value, dict) else keys.append(name)
    return tuple(key for key in keys if key != "workload.settings")


def _workload_group(choice: Any) -> str | None:
    if choice is None or ":" in str(choice):
        return None
    if choice not in (known := names_in("workload")):
        raise unknown("workload", choice, known)
    return str(choice)


@cache
def _base(workload: str | None) -> Any:
    """The composed configuration before any override of a value."""
    choice = [] if workload is None else [f"workload={workload}"]
    with initialize_config_module("bench.conf", version_base="1.3"):
        return hydra_compose("config", overrides=choice)


def _update(config: Any, key: str, override: Any) -> None:
    try:
        OmegaConf.update(config, key, override.value(), force_add=True)
    except OmegaConfBaseException as error:
        raise BadInput(f"cannot apply {override.input_line!r}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
