"""`oombench bench`: which sweep belongs to a card, and what of it is measured here."""

from __future__ import annotations

from collections.abc import Sequence

from bench import host
from bench.config import Job
from bench.errors import BadInput, unknown
from bench.overrides import names_in
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
    predicted = distinct(plan([*row, "source=predicted"]) for row in rows)
    measured = distinct(plan([*row, "source=measured"]) for row in rows if _is_here(row))
    if measured:
        said = f"{target} is here: measuring {len(measured)} cells, predicting {len(predicted)} beside them"
    else:
        said = f"{target} is not measured: {why_not_measured(find_target(target))}; predicting on the virtual GPU"
    return said, [*measured, *predicted]


def _sweep_for(card: str) -> tuple[Sweep, str]:
    """The sweep called `card`, or made for the target `card`, or the general one; and the target."""
    from bench.vgpu.targets import TARGETS

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
    from bench.vgpu.targets import TARGETS

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
    return why_not_measured(find_target(plan([*row, "source=predicted"]).cell.target)) is None
