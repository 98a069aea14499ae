"""Techniques whose value is one of a few words, or true or false."""

from __future__ import annotations

from typing import Any, ClassVar

from bench.errors import unknown
from bench.techniques.base import Technique


class Choice(Technique):
    """A technique with named values.

    Attributes:
        words: The values, the neutral one included.
    """

    words: ClassVar[tuple[str, ...]]

    @classmethod
    def parse(cls, value: Any) -> Any:
        """One of `words`; true and false stand for "on" and "off" where those are words (YAML reads them so)."""
        if isinstance(value, bool):
            value = "on" if value else "off"
        if value in cls.words:
            return value
        raise unknown(f"{cls.name} value", value, cls.words)


class Toggle(Technique):
    """A technique that is true or false."""

    @classmethod
    def parse(cls, value: Any) -> bool:
        """True or False; "on" and "off" stand for them, as tables print them so."""
        if isinstance(value, bool):
            return value
        if value in ("on", "off"):
            return bool(value == "on")
        raise unknown(f"{cls.name} value", value, ("true", "false"))
