"""Commands that ask where the memory goes: explain, diff, replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.cwd import cwd_on_path

Top = Annotated[int, typer.Option("--top", min=1, help="Rows of each table.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of tables, every row in it.")]


def explain(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="The cell, as for oombench run.")
    ] = None,
    top: Top = 10,
    as_json: Json = False,
) -> None:
    """Say what occupies the memory at a step's peak, or when it runs out: oombench explain workload=seq2seq_beam"""
    from bench.explaining import explained, planned

    cwd_on_path()
    job = planned(overrides or [])
    record, moment = explained(job)
    if as_json:
        _print_json(
            {"label": job.label, "key": record.key, "status": record.status, "reason": record.reason}, moment, top
        )
        return
    from bench.show_memory import print_moment

    console = _console()
    console.print(job.label, soft_wrap=True)
    if record.reason is not None:
        console.print(record.reason, soft_wrap=True)
    print_moment(console, moment, top)


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A snapshot file, a cell's KEY, or STORE.jsonl:KEY.")],
    after: Annotated[str, typer.Argument(metavar="B", help="What to compare with A.")],
    stores: Annotated[
        list[Path] | None, typer.Option("--store", help="Where keys are looked for; default: results/*.")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="peak|end", help="Moment of snapshots; default: peak, if traced.")
    ] = None,
    top: Top = 10,
    as_json: Json = False,
) -> None:
    """Say what changed in memory from A to B: oombench diff before.pickle after.pickle"""
    from bench.errors import unknown

    if at not in (None, "peak", "end"):
        raise unknown("moment", at, ("peak", "end"))
    from bench.sides import compare

    cwd_on_path()
    difference = compare([before, after], stores or [], at)
    if as_json:
        print(json.dumps(difference.to_dict(), indent=1))
        return
    from bench.show_memory import print_difference

    print_difference(_console(), difference, top)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A snapshot of torch.cuda.memory._dump_snapshot.")],
    alloc_conf: Annotated[
        str | None, typer.Option("--alloc-conf", metavar="CONF", help="As PYTORCH_CUDA_ALLOC_CONF.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="A card: oombench targets lists them.")] = None,
    device: Annotated[int | None, typer.Option("--device", min=0, help="Which of several; default: the first.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a recorded run would have reserved otherwise: oombench replay FILE --target h100"""
    from bench.what_if import what_if

    replays = what_if(file, alloc_conf, target, device)
    if as_json:
        print(json.dumps(replays.to_dict(), indent=1))
        return
    from bench.show_memory import print_replays

    print_replays(_console(), replays)


def register(app: typer.Typer) -> None:
    """Make these commands of `app`."""
    for command in (explain, diff, replay):
        app.command()(command)


def _print_json(facts: dict[str, Any], moment: Any, top: int) -> None:
    print(json.dumps(facts | moment.to_dict(top), indent=1))


def _console() -> Console:
    """As for other results, but with room for long names where no terminal sets the width."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=max(console.width, 240))
