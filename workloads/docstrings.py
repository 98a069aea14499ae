"""Functions of the Python standard library paired with the first line of their docstrings.

Real text that every machine with a Python already has. The text differs between Python versions, so nothing that
depends on a size may be read from it: `Vocabulary` has exactly the size asked for, `Vocabulary.encode` the length.
"""

from __future__ import annotations

import ast
import gc
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MODULES: tuple[str, ...] = (
    *("_collections_abc", "_pydecimal", "_pyio", "ast", "asyncio", "base64", "bdb", "bz2", "calendar", "codecs"),
    *("collections", "concurrent", "configparser", "contextlib", "datetime", "difflib", "dis", "doctest", "email"),
    *("enum", "fractions", "ftplib", "functools", "gzip", "heapq", "http", "imaplib", "importlib", "inspect"),
    *("ipaddress", "json", "locale", "logging", "lzma", "mailbox", "multiprocessing", "ntpath", "numbers", "operator"),
    *("optparse", "os", "pathlib", "pdb", "pickle", "pickletools", "platform", "poplib", "posixpath", "pydoc"),
    *("queue", "random", "selectors", "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics"),
    *("subprocess", "tarfile", "tempfile", "textwrap", "threading", "traceback", "typing", "unittest", "urllib"),
    *("uuid", "wsgiref", "xml", "xmlrpc", "zipfile"),
)
"""Modules and packages that Python 3.11 to 3.14 ship whatever the distribution leaves out (so no tkinter)."""

END = 0
"""Token that ends a sequence, pads it to its length and starts a decode. It has no text."""
UNKNOWN = 1
"""Token of every word outside the vocabulary. It has no text either."""

MIN_SUMMARY_WORDS = 3
"""Shorter first lines ("See base class.") say nothing about their function."""

# Words of an identifier split at underscores and at camelCase humps, runs of digits, and single marks.
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\sA-Za-z0-9_]")


@dataclass(frozen=True)
class Pair:
    """One function: the tokens of its source without the docstring, and those of the docstring's first line."""

    source: tuple[str, ...]
    summary: tuple[str, ...]


def tokenise(text: str) -> tuple[str, ...]:
    """Lower-case words and marks of `text`: "getFile_name(x)" is get, file, name, (, x, )."""
    return tuple(token.lower() for token in _TOKEN.findall(text))


@lru_cache(maxsize=1)
def load_pairs() -> tuple[Pair, ...]:
    """Every documented function of `MODULES`, in the order of files and lines; the same on every call."""
    root = Path(sysconfig.get_path("stdlib"))
    with _no_collection():
        return tuple(pair for path in _files(root) for pair in read_pairs(path.read_text(encoding="utf-8")))


def read_pairs(text: str) -> Iterator[Pair]:
    """The documented functions and methods of one file, in the order of their lines."""
    # Not splitlines(): the standard library has form feeds, which Python does not count as line ends.
    lines = text.split("\n")
    for node in _functions(ast.parse(text).body):
        docstring = ast.get_docstring(node)
        if docstring is None or not docstring.isascii():
            continue
        first_line = docstring.split("\n", 1)[0]
        if first_line.startswith(">>>"):  # a doctest, not a summary
            continue
        summary = tokenise(first_line)
        if len(summary) >= MIN_SUMMARY_WORDS and len(node.body) > 1:
            yield Pair(tokenise(_without_docstring(node, lines)), summary)


@contextmanager
def _no_collection() -> Iterator[None]:
    # The parser's nodes set off full collections, each of which walks all that torch has loaded: half the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _files(root: Path) -> Iterator[Path]:
    for name in MODULES:
        if (root / f"{name}.py").is_file():
            yield root / f"{name}.py"
        inside = sorted((root / name).rglob("*.py"))
        yield from (path for path in inside if not {"test", "tests"}.intersection(path.parts[len(root.parts) :]))


def _functions(statements: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    # Statements only: ast.walk() would visit every expression too.
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        for nested in ("body", "handlers", "orelse", "finalbody"):
            yield from _functions(getattr(statement, nested, ()))


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> str:
    docstring = node.body[0]
    head = lines[node.lineno - 1 : docstring.lineno - 1]
    body = lines[docstring.end_lineno : node.end_lineno]
    return "\n".join((*head, *body))


class Vocabulary:
    """Words and their tokens: `END`, `UNKNOWN`, then words from the most frequent on.

    Args:
        pairs: The corpus. A word's rank is the mean of its share among the source words and its share among the
            summary words, so that a small vocabulary is not all punctuation of the sources; ties go by the alphabet.
        size: Tokens in all. Those that the corpus has no word for stay without text.

    Raises:
        ValueError: `size` leaves no room for `END` and `UNKNOWN`.
    """

    def __init__(self, pairs: Iterable[Pair], size: int) -> None:
        if size < 2:
            raise ValueError(f"a vocabulary needs at least 2 tokens, not {size}")
        ranked = _ranked_words(tuple(pairs))[: size - 2]
        self._words = ("", "", *ranked, *("",) * (size - 2 - len(ranked)))
        self._tokens = {word: token for token, word in enumerate(ranked, start=2)}

    def __len__(self) -> int:
        return len(self._words)

    def token(self, word: str) -> int:
        """The token of `word`, or `UNKNOWN`."""
        return self._tokens.get(word, UNKNOWN)

    def encode(self, words: Sequence[str], length: int) -> NDArray[np.int64]:
        """Exactly `length` tokens: the first words of `words`, padded with `END` on the left.

        Left, because an encoder then reads its last word last, whatever the padding.
        """
        kept = [self.token(word) for word in words[:length]]
        return np.array([END] * (length - len(kept)) + kept, dtype=np.int64)

    def decode(self, tokens: Iterable[int]) -> tuple[str, ...]:
        """The words before the first `END`; tokens without text are left out."""
        live = takewhile(lambda token: token != END, tokens)
        return tuple(word for token in live if (word := self._words[token]))


def _ranked_words(pairs: Sequence[Pair]) -> list[str]:
    sources = Counter(word for pair in pairs for word in pair.source)
    summaries = Counter(word for pair in pairs for word in pair.summary)
    source_total, summary_total = max(1, sources.total()), max(1, summaries.total())

    # Shares over the common denominator: whole numbers order the same on every machine.
    def share(word: str) -> int:
        return sources[word] * summary_total + summaries[word] * source_total

    return sorted(sources.keys() | summaries.keys(), key=lambda word: (-share(word), word))
