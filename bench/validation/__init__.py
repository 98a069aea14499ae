"""What the virtual GPU predicts against what others measured on real cards and published.

    oombench validate

rebuilds every published measurement on a virtual card of the same kind, under the rules of the PyTorch release that was
used, and compares. The models are written anew from their descriptions; the figures are in published.csv, each with
its source.
"""

from bench.validation.outcome import Outcome, Spread, spreads, validate
from bench.validation.published import Published, Tolerance, published_rows

__all__ = ["Outcome", "Published", "Spread", "Tolerance", "published_rows", "spreads", "validate"]
