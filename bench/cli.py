"""The command line. Heavy imports are made by the command that needs them, so that a bad word is answered at once."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from bench.cli_memory import register
from bench.cwd import cwd_on_path
from bench.errors import OombenchError, Refused

app = typer.Typer(
    name="oombench",
    help="What it costs to make a training step fit on a GPU: memory, time, gradient; measured or predicted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides: target=k80 technique.precision=bf16 steps.timed=5"),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Cells at once; default: as processors and memory allow.")
]
LimitMemory = Annotated[
    float | None,
    typer.Option("--limit-memory", min=0, metavar="GIB", help="Host memory that all cells together may use."),
]
Retry = Annotated[bool, typer.Option("--retry", help="Run cells again that crashed or timed out.")]
Rerun = Annotated[bool, typer.Option("--rerun", help="Run every cell again, whatever the store holds.")]

# Typer's base of wrong options and arguments; its module is private and moves between versions.
UsageError = cast(type[Exception], typer.BadParameter.__mro__[2])


def main(arguments: list[str] | None = None) -> int:
    """Entry point: the exit status. What the user can correct is one line on stderr."""
    try:
        status = app(args=arguments, prog_name="oombench", standalone_mode=False) or 0
    except OombenchError as error:
        return _fail(str(error), error.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except UsageError as error:
        line = cast(Any, error).format_message()
        return _fail(line, 2) if line else 2  # no line: typer has printed its help instead
    return _fail("interrupted", 130) if status == 130 else int(status)  # typer's own answer to Ctrl-C, without a word


def _fail(line: str, status: int) -> int:
    print(f"oombench: {' '.join(line.split())}", file=sys.stderr)
    return status


def _console() -> Console:
    """For results: plain text, in which brackets are only brackets."""
    return Console(markup=False, highlight=False)


@app.command()
def run(
    overrides: Overrides = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Expand a,b and range(1,5), run every combination.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print memory at every call of the workload's phases.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say in the record what occupied the memory at the peak, or at an OOM.")
    ] = False,
    jobs: Jobs = None,
    limit_memory: LimitMemory = None,
    retry: Retry = False,
    rerun: Rerun = False,
) -> int:
    """Run one cell, or with --multirun every combination: oombench run workload=seq2seq_beam target=k80"""
    words = [*(overrides or []), *(["trace=true"] if trace else []), *(["explain=true"] if explain else [])]
    if not multirun:
        return _run_one(words)
    from bench.overrides import expand
    from bench.publication import print_tables
    from bench.resolve import plan
    from bench.sweep import distinct, execute

    cwd_on_path()
    planned = distinct(plan(combination) for combination in expand(words))
    console = _console()
    show = partial(print_tables, sorted({job.store for job in planned}), [job.cell for job in planned], console)
    return _status(execute(planned, _options(jobs, limit_memory), console, retry=retry, rerun=rerun, finished=show))


def _run_one(words: list[str]) -> int:
    """Run one cell, store it, print it."""
    from bench import runner
    from bench.record import Status
    from bench.resolve import plan, refusal
    from bench.show import print_record, print_trace
    from bench.store import Store

    cwd_on_path()
    job = plan(words)
    if (reason := refusal(job.cell)) is not None:
        raise Refused(reason)
    store = Store(job.store)
    store.prepare()
    [outcome] = runner.run_jobs([job], runner.Options(quiet=False, run_cell=runner.RUN_CELL))
    store.append(outcome.record)
    console = _console()
    if job.trace and outcome.trace:
        print_trace(console, outcome.trace)
    elif job.trace:
        _print("no trace: the cell ended before there was anything to tell")
    print_record(console, job.label, outcome.record)
    return {Status.OK: 0, Status.OOM: 0, Status.REFUSED: 2}.get(outcome.record.status, 1)


@app.command()
def sweep(
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A sweep of bench/conf/sweep, or a YAML file of that form.")
    ],
    overrides: Overrides = None,
    jobs: Jobs = None,
    limit_memory: LimitMemory = None,
    retry: Retry = False,
    rerun: Rerun = False,
) -> int:
    """Run a sweep; interrupted, it resumes: oombench sweep 4090 --jobs 2"""
    from bench.sweep import execute, load_sweep

    cwd_on_path()
    planned = load_sweep(name).jobs(overrides or [])
    return _status(execute(planned, _options(jobs, limit_memory), _console(), retry=retry, rerun=rerun))


@app.command()
def bench(
    card: Annotated[
        str,
        typer.Argument(metavar="CARD", help="A target (rtx4090, h100), a sweep (4090), or local: this machine's card."),
    ],
    overrides: Overrides = None,
    jobs: Jobs = None,
    limit_memory: LimitMemory = None,
    retry: Retry = False,
    rerun: Rerun = False,
) -> int:
    """Sweep a card and publish: measured beside predicted where the card is present, predicted elsewhere."""
    from bench.card import bench_jobs
    from bench.publication import publish_stores
    from bench.sweep import execute

    cwd_on_path()
    said, planned = bench_jobs(card, overrides or [])
    console = _console()
    console.print(said, soft_wrap=True)
    counts = execute(planned, _options(jobs, limit_memory), console, retry=retry, rerun=rerun, again=not retry)
    publish_stores(sorted({job.store for job in planned}), None, console, [job.cell for job in planned])
    return _status(counts)


@app.command()
def report(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Stores, or folders with a cells.jsonl; default: results/*.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FOLDER", help="Where a folder per target is made; default: beside the store."),
    ] = None,
) -> None:
    """Publish tables and plots of stored records."""
    from bench.publication import publish_stores, stores_at

    cwd_on_path()
    publish_stores(stores_at(paths or []), into, _console())


@app.command()
def validate(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Only rows whose id contains one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document in place of tables.")] = False,
    derive: Annotated[
        bool, typer.Option("--derive", help="Derive the target table's figures anew, and no more.")
    ] = False,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FOLDER", help="Write accuracy.md and .csv there.")
    ] = None,
) -> int:
    """Predict published measurements and print the error of each; exit status 1 if one misses its tolerance.

    Allocator traces recorded on real cards are replayed too, where they lie beside this clone (../shared).
    """
    from bench.errors import unknown
    from bench.validation import show
    from bench.validation.outcome import validate as predict
    from bench.validation.published import published_rows
    from bench.validation.traces import replayed

    if derive:
        print(show.derived())
        return 0
    known = published_rows()
    rows = [row for row in known if not texts or any(text in row.id for text in texts)]
    if not rows:
        raise unknown("published row", " ".join(texts or []), [row.id for row in known])
    traces = [] if texts else replayed()
    outcomes = predict(rows)
    print(show.as_json(outcomes, traces) if as_json else show.as_tables(outcomes, traces))
    for path in show.publish(outcomes, into, traces) if into else []:
        print(path)
    return int(not all(outcome.holds for outcome in outcomes) or not all(trace.exact for trace in traces))


@app.command()
def phases(
    target: Annotated[str, typer.Option("--target", help="The card.")] = "h100",
) -> None:
    """Print peaks of a 3.4-billion-parameter decoder LM step, phase by phase."""
    from bench.resolve import find_target
    from bench.validation.phases import as_table

    found = find_target(target)
    print(f"predicted for {found.name}: batch 4, width 2560, feed-forward 10240, 32 layers, 32 heads, peak allocated")
    print(as_table(found))


@app.command()
def targets() -> None:
    """List the cards."""
    from bench.targets import TARGETS

    for target in TARGETS.values():
        cards = f", {target.world_size} cards" if target.world_size > 1 else ""
        _print(f"{target.name:12} {target.title}, {target.capacity_bytes / 2**30:.2f} GiB usable{cards}")


@app.command()
def workloads() -> None:
    """List the workloads."""
    from bench.overrides import compose, names_in

    for name in names_in("workload"):
        for framework, path in compose([f"workload={name}"]).workload.frameworks.items():
            _print(f"{name:18} {framework:10} {path}")


@app.command()
def techniques() -> None:
    """List the techniques."""
    from bench.frameworks import FRAMEWORKS
    from bench.techniques import techniques_of

    for framework in FRAMEWORKS:
        _print(f"in {framework}:")
        for name, technique in techniques_of(framework).items():
            summary = (technique.__doc__ or "").strip().partition("\n")[0]
            _print(f"  {name:14} off: {'null' if technique.off is None else technique.off!s:8} {summary}")


register(app)


def _print(line: str) -> None:
    _console().print(line, soft_wrap=True)


def _options(jobs: int | None, limit_memory_gib: float | None) -> Any:
    from bench import host, runner

    limit_bytes = None if limit_memory_gib is None else int(limit_memory_gib * 2**30)
    return runner.Options(workers=host.worker_count(jobs, limit_bytes), run_cell=runner.RUN_CELL)


def _status(counts: Any) -> int:
    """1 where a cell gave no result, though it could have."""
    from bench.sweep import AGAIN

    return 1 if any(counts[status] for status in AGAIN) else 0
