"""Prediction against publication, row by row and by family."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.validation import attention, bert, layers, lm_step
from bench.validation.calibration import SOURCE_ROWS
from bench.validation.published import Published, published_rows

Predictor = Callable[[Published], float]

# (begin of the id, its end) -> family, and what predicts its rows in bytes or seconds; the first that fits counts.
_FAMILIES: Mapping[tuple[str, str], tuple[str, Predictor]] = {
    ("attention_", ""): ("attention", attention.predict),
    ("decoder_lm_", "_fits"): ("decoder LM, fits", lm_step.predict_fit),
    ("decoder_lm_", "_h100_step_ms"): ("decoder LM, step time", lm_step.predict_step),
    ("decoder_lm_", "_ms"): ("decoder LM, phase time", lm_step.predict_phase),
    ("decoder_lm_", ""): ("decoder LM, memory", lm_step.predict_peak),
    ("llama_mlp_", "_ms"): ("MLP, time", layers.predict),
    ("llama_mlp_", ""): ("MLP, memory", layers.predict),
    ("cross_entropy_", ""): ("cross entropy", layers.predict),
    ("layer_norm_", ""): ("layer norm", layers.predict),
    ("rms_norm_", ""): ("RMS norm", layers.predict),
    ("empty_linear_", ""): ("workspace", layers.predict_workspace),
    ("bert_", ""): ("BERT, process memory", bert.predict),
}


@dataclass(frozen=True)
class Outcome:
    """One row, predicted.

    Attributes:
        row: What was published.
        family: What it belongs to.
        predicted: In the row's unit.
        held_out: Whether the target table knows nothing of the row; else a figure there was derived from it.
    """

    row: Published
    family: str
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        """Relative error with its sign; negative: the prediction is too low. 0 if it is what was printed."""
        if round(self.predicted, self.row.decimals) == self.row.value:
            return 0.0
        return (self.predicted - self.row.value) / self.row.value if self.row.value else math.inf

    @property
    def holds(self) -> bool:
        """Whether it lies within the row's tolerance."""
        return self.row.tolerance.holds(self.predicted, self.row.value)


@dataclass(frozen=True)
class Spread:
    """Errors of one family's rows that are held out, as shares of the published values.

    Attributes:
        family: Its name.
        rows: How many rows it has.
        missed: How many of them lie outside their tolerance.
        held_out: How many of them no figure was derived from. The rest here is about these.
        too_low: How many are predicted too low.
        lowest_by: By how much at most.
        median: The absolute error in the middle.
        p90: The absolute error that nine tenths do not exceed.
        worst: The largest absolute error.
    """

    family: str
    rows: int
    missed: int
    held_out: int
    too_low: int
    lowest_by: float
    median: float
    p90: float
    worst: float


def validate(rows: Iterable[Published] | None = None) -> list[Outcome]:
    """Predict every published row, or those given."""
    return [_outcome(row) for row in (published_rows() if rows is None else rows)]


def _outcome(row: Published) -> Outcome:
    family, predict = next(
        found for (begin, end), found in _FAMILIES.items() if row.id.startswith(begin) and row.id.endswith(end)
    )
    predicted = row.in_unit(predict(row))
    gc.collect()  # modules and graphs are cycles, and what one run left must not be freed in the next
    return Outcome(row, family, predicted, row.id not in SOURCE_ROWS)


def spreads(outcomes: Iterable[Outcome]) -> Iterator[Spread]:
    """The errors by family, in order of first appearance."""
    families: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        families.setdefault(outcome.family, []).append(outcome)
    return (_spread(family, members) for family, members in families.items())


def _spread(family: str, members: list[Outcome]) -> Spread:
    errors = [outcome.error for outcome in members if outcome.held_out]
    sizes = sorted(abs(error) for error in errors)
    low = [-error for error in errors if error < 0]
    return Spread(
        family=family,
        rows=len(members),
        missed=sum(not outcome.holds for outcome in members),
        held_out=len(errors),
        too_low=len(low),
        lowest_by=max(low, default=0.0),
        median=quantile(sizes, 0.5),
        p90=quantile(sizes, 0.9),
        worst=quantile(sizes, 1.0),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
