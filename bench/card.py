"""`oombench bench`: which sweep belongs to a card, and what of it is measured here."""

from __future__ import annotations

from collections.abc import Sequence

from bench import host
from bench.config import Job
from bench.errors import BadInput, unknown
from bench.frameworks import find_framework
from bench.overrides import names_in
from bench.record import Source
from bench.resolve import find_target, plan, why_not_measured
from bench.sweep import Sweep, distinct, load_sweep

GENERAL = "4090"
"""The sweep for a card that has none of its own."""


def bench_jobs(card: str, overrides: Sequence[str]) -> tuple[str, list[Job]]:
    """What to do for `card`, and the line that says where its numbers will come from.

    Args:
        card: A target, a sweep, or "local" for the card of this machine.
        overrides: Applied to every cell; the source is not among them.

    Raises:
        BadInput: No such card is known, or `card` is "local" and nothing can be measured here.
    """
    if any(word.startswith("source=") for word in overrides):
        raise BadInput("bench measures where it can and predicts beside it: leave out source=")
    sweep, target = _sweep_for(_local() if card == "local" else card)
    retarget = [] if target == sweep.card else [f"target={target}"]
    rows = [[*row, *retarget, *overrides] for row in sweep.rows]
    here = [_is_here(row) for row in rows]
    predicted = distinct(_without_card(row) for row in rows)
    measured = distinct(plan([*row, "source=measured"]) for row, is_here in zip(rows, here, strict=True) if is_here)
    if measured:
        present = _targets(measured)
        said = f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} here"
        said += f": measuring {len(measured)} cells, predicting {len(predicted)} beside them"
    else:
        reasons = [f"{name} is not measured: {why_not_measured(find_target(name))}" for name in _targets(predicted)]
        said = "; ".join([*reasons, "predicting on the virtual GPU"])
    return said, [*measured, *predicted]


def _targets(jobs: Sequence[Job]) -> list[str]:
    """The targets of the jobs, which rows and overrides choose: not always the card that was asked for."""
    return list(dict.fromkeys(job.cell.target for job in jobs))


def _sweep_for(card: str) -> tuple[Sweep, str]:
    """The sweep called `card`, or made for the target `card`, or the general one; and the target."""
    from bench.targets import TARGETS

    names = names_in("sweep")
    if card in names:
        sweep = load_sweep(card)
        return sweep, sweep.card
    if card not in TARGETS:
        raise unknown("card", card, [*TARGETS, *names, "local"])
    own = [sweep for sweep in map(load_sweep, names) if sweep.card == card]
    return (own[0] if own else load_sweep(GENERAL)), card


def _local() -> str:
    """The name of this machine's card in the target table."""
    from bench.targets import TARGETS

    if not host.cards():
        raise BadInput("no accelerator in this machine: nothing to measure (oombench bench 4090 predicts a card)")
    for target in TARGETS.values():
        if target.title in host.cards() and target.world_size == 1:
            if (reason := why_not_measured(target)) is not None:
                raise BadInput(f"nothing can be measured on this machine's {target.title}: {reason}")
            return target.name
    raise BadInput(f"the target table has no row for this machine's {', '.join(host.cards())}")


def _is_here(row: Sequence[str]) -> bool:
    """Whether the target of a row can be measured on this machine."""
    return plan(row).cell.source is Source.MEASURED


def _without_card(row: Sequence[str]) -> Job:
    """The job of a row as it is where the card is absent."""
    framework = find_framework(plan(row).cell.framework)
    return plan([*row, f"source={framework.absent}"])
