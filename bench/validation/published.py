"""Measurements that others published, as rows: what was measured, on which card, how near predictions have to come."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from importlib.resources import files

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Tolerance:
    """How far a prediction may lie from what was measured.

    Attributes:
        text: As the table has it.
        absolute: In the row's unit.
        relative: As a share of the measured value; the wider of the two counts.
    """

    text: str
    absolute: float
    relative: float

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """Read `15 %`, `0.25 MiB`, `0.05 MiB or 6 digits`, `exact` or `0`; digits are significant ones.

        Raises:
            ValueError: It is none of these.
        """
        if text == "exact":
            return cls(text, 0.0, 0.0)
        absolute = relative = 0.0
        for part in text.split(" or "):
            match = re.fullmatch(r"([0-9.]+)(?: (MiB|%|digits))?", part)
            if match is None:
                raise ValueError(f"{text!r} is no tolerance")
            number = float(match[1])
            if match[2] == "%":
                relative = number / 100
            elif match[2] == "digits":
                relative = 0.5 * 10 ** (1 - number)
            else:
                absolute = number
        return cls(text, absolute, relative)

    def holds(self, predicted: float, measured: float) -> bool:
        """Whether the prediction is near enough."""
        return abs(predicted - measured) <= max(self.absolute, self.relative * abs(measured)) + 1e-9


@dataclass(frozen=True)
class Published:
    """One measured figure.

    Attributes:
        id: Name of the row; begins with its family.
        card: The card in words, see `bench.validation.cards`.
        torch: PyTorch's version in words.
        what: What ran.
        metric: What was measured: a peak of memory, a time, whether it fits.
        value: In `unit`.
        decimals: Digits after the point, as printed.
        unit: MiB, GiB, B, ms, bool, or MB (NVML), which are MiB.
        tolerance: How near a prediction has to come.
        source: Who published it.
    """

    id: str
    card: str
    torch: str
    what: str
    metric: str
    value: float
    decimals: int
    unit: str
    tolerance: Tolerance
    source: str

    def in_unit(self, amount: float) -> float:
        """Bytes or seconds, in the row's unit; a truth value as 0 or 1."""
        return amount / {"MiB": MIB, "GiB": GIB, "MB (NVML)": MIB, "ms": 1e-3}.get(self.unit, 1)


def published_rows() -> list[Published]:
    """Every row, in the order of the table."""
    text = files("bench.validation").joinpath("published.csv").read_text(encoding="utf-8")
    return [_published(row) for row in csv.DictReader(text.splitlines())]


def _published(row: dict[str, str]) -> Published:
    decimals = len(row["value"].partition(".")[2])
    typed = {"value": float(row["value"]), "decimals": decimals, "tolerance": Tolerance.parse(row["tolerance"])}
    return Published(**{**row, **typed})  # type: ignore[arg-type]
