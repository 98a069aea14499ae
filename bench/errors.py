"""What can go wrong, as a tree.

OombenchError
├── BadInput           the user named something that does not exist, or a value that cannot be
├── Refused            a technique that this workload cannot take
├── store.WriteFailed  a full disk, a folder without permission
└── sweep.Interrupted  Ctrl-C
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OombenchError(Exception):
    """Base of all errors with a message for the user: one line, no traceback.

    Attributes:
        exit_status: Of the command that it ends.
    """

    exit_status = 2


class BadInput(OombenchError):
    """A name, value or combination that the user has to correct."""


class Refused(OombenchError):
    """A technique that a workload cannot take; a row with a reason in a sweep, the end of a single run."""


def unknown(kind: str, word: object, known: Iterable[object]) -> BadInput:
    """The one line for a word that is not among the `known` ones, with the nearest of them."""
    names = [str(name) for name in known]
    near = difflib.get_close_matches(str(word), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return BadInput(f"unknown {kind} {str(word)!r}: {hint}known: {', '.join(names)}")
