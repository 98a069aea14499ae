"""Pickles of plain containers, read without the power to do anything else.

A pickle is a program; `pickle.loads` runs it, and it may import and call what it likes. This reader knows only the
instructions that build dicts with string keys, lists, tuples, strings, bytes, numbers, truth values and None: there is
nothing in it that could import or call. What torch writes as a memory snapshot needs no more. Its costs are bounded:
integers and numbers of containers beyond the limits below are refused, and a byte of the pickle costs at most some 13
bytes of host memory beside its containers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MAX_CONTAINERS = 10_000_000  # some 2 GB of host memory
MAX_INTEGER_BYTES = 16


class NotPlain(ValueError):
    """The file is no pickle of plain containers; the message is one line."""


def loads(data: bytes) -> Any:
    """The value that a pickle of protocol 0 to 5 builds.

    Raises:
        NotPlain: It needs more than plain containers, is damaged, or is larger than the limits allow.
    """
    try:
        return _Reader(data).value()
    except NotPlain:
        raise
    # What a damaged program can run into: an empty stack, an end of file, a wrong type, a bad encoding or digit.
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise NotPlain(f"damaged pickle ({type(error).__name__})") from error


class _Reader:
    """A stack machine over the bytes of one pickle."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._containers = 0

    def value(self) -> Any:
        data, steps = self._data, _STEPS
        while True:
            if self._at >= len(data):
                raise NotPlain("truncated pickle")
            opcode = data[self._at]
            self._at += 1
            if opcode == _STOP:
                return self._stack.pop()
            step = steps[opcode]
            if step is None:
                raise NotPlain(f"pickle with more than plain containers (opcode {opcode:#04x})")
            step(self)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            raise NotPlain("truncated pickle")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise NotPlain("truncated pickle")
        piece = self._data[self._at : end]
        self._at = end + 1
        return piece

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def build(self, container: Any) -> None:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise NotPlain(f"pickle of more than {MAX_CONTAINERS:,} containers")
        self._stack.append(container)

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def marked(self) -> list[Any]:
        """What was pushed since the last mark, which is undone."""
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        if len(self._stack) < count:
            raise NotPlain("damaged pickle (too short a stack)")
        items = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        return items

    def extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise NotPlain("damaged pickle (append to no list)")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise NotPlain("damaged pickle (items for no dict)")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:  # other keys could be made to collide
                raise NotPlain(f"pickle with a dict key that is a {type(key).__name__}, not a string")
            target[key] = value

    def integer(self, count: int) -> None:
        if count > MAX_INTEGER_BYTES:
            raise NotPlain(f"pickle with an integer of {count} bytes")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def digits(self, text: bytes) -> None:
        if len(text) > 3 * MAX_INTEGER_BYTES:
            raise NotPlain(f"pickle with an integer of {len(text)} digits")
        self.push(int(text))

    def memoize(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def recall(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def text(self, piece: bytes) -> None:
        self._stack.append(piece.decode("utf-8", "surrogatepass"))


_BYTE, _U2, _I4, _U4, _U8 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q"))
_FLOAT = struct.Struct(">d")
_STOP = ord(".")


def _int_line(reader: _Reader) -> None:
    text = reader.line()
    if text in (b"00", b"01"):  # protocol 0 writes truth values so
        reader.push(text == b"01")
    else:
        reader.digits(text)


def _update(reader: _Reader) -> None:
    items = reader.marked()
    reader.update(items)


def _extend(reader: _Reader) -> None:
    items = reader.marked()
    reader.extend(items)


def _dict(reader: _Reader) -> None:
    items = reader.marked()
    reader.build({})
    reader.update(items)


_BY_OPCODE: dict[bytes, Callable[[_Reader], None]] = {
    b"\x80": lambda r: _protocol(r.number(_BYTE)),
    b"\x95": lambda r: _frame(r.number(_U8)),
    b"(": lambda r: r.mark(),
    b"N": lambda r: r.push(None),
    b"\x88": lambda r: r.push(True),
    b"\x89": lambda r: r.push(False),
    b"I": _int_line,
    b"L": lambda r: r.digits(r.line().removesuffix(b"L")),
    b"J": lambda r: r.push(r.number(_I4)),
    b"K": lambda r: r.push(r.number(_BYTE)),
    b"M": lambda r: r.push(r.number(_U2)),
    b"\x8a": lambda r: r.integer(r.number(_BYTE)),
    b"F": lambda r: r.push(float(r.line())),
    b"G": lambda r: r.push(r.number(_FLOAT)),
    b"V": lambda r: r.push(r.line().decode("raw-unicode-escape")),
    b"X": lambda r: r.text(r.take(r.number(_U4))),
    b"\x8c": lambda r: r.text(r.take(r.number(_BYTE))),
    b"\x8d": lambda r: r.text(r.take(r.number(_U8))),
    b"B": lambda r: r.push(r.take(r.number(_U4))),
    b"C": lambda r: r.push(r.take(r.number(_BYTE))),
    b"\x8e": lambda r: r.push(r.take(r.number(_U8))),
    b"]": lambda r: r.build([]),
    b"l": lambda r: r.build(r.marked()),
    b"a": lambda r: r.extend(list(r.last(1))),
    b"e": _extend,
    b"}": lambda r: r.build({}),
    b"d": _dict,
    b"s": lambda r: r.update(list(r.last(2))),
    b"u": _update,
    b")": lambda r: r.push(()),
    b"t": lambda r: r.build(tuple(r.marked())),
    b"\x85": lambda r: r.build(r.last(1)),
    b"\x86": lambda r: r.build(r.last(2)),
    b"\x87": lambda r: r.build(r.last(3)),
    b"p": lambda r: r.memoize(int(r.line())),
    b"q": lambda r: r.memoize(r.number(_BYTE)),
    b"r": lambda r: r.memoize(r.number(_U4)),
    b"\x94": lambda r: r.memoize(len(r._memo)),
    b"g": lambda r: r.recall(int(r.line())),
    b"h": lambda r: r.recall(r.number(_BYTE)),
    b"j": lambda r: r.recall(r.number(_U4)),
    b"0": lambda r: r._stack.pop(),
}


def _protocol(version: int) -> None:
    if version > 5:
        raise NotPlain(f"pickle of protocol {version}")


def _frame(_length: int) -> None:
    """How much of the program follows at once, of use to one who reads it piece by piece."""


_STEPS = [_BY_OPCODE.get(bytes([opcode])) for opcode in range(256)]
