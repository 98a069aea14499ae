"""The reader of pickles: what it reads, it reads as pickle does; all else is refused, and nothing of it happens."""

from __future__ import annotations

import collections
import datetime
import os
import pickle
import pickletools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import plain_pickle
from bench.plain_pickle import NotPlain, loads

checked = settings(max_examples=150, deadline=None, derandomize=True, database=None)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**120), 2**120),
    st.floats(allow_nan=False),
    st.text(max_size=300),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.text(max_size=8), inner, max_size=5),
    ),
    max_leaves=20,
)


@checked
@given(values, st.integers(0, 5))
def test_plain_values_come_back_from_every_protocol(value: Any, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol)) == value


@checked
@given(st.binary(max_size=400), st.integers(3, 5))
def test_bytes_come_back(value: bytes, protocol: int) -> None:
    assert loads(pickle.dumps([value, value], protocol)) == [value, value]


def test_what_is_shared_stays_shared() -> None:
    frames = [{"name": "f"}]
    first, second = loads(pickle.dumps([frames, frames], 4))
    assert first is second


class Calls:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        Calls(os.system, "touch touched"),
        Calls(eval, "__import__('os').system('touch touched')"),
        datetime.date(2020, 1, 1),
        collections.OrderedDict(a=1),
        {1, 2},
        complex(1, 2),
        print,
    ],
    ids=["system", "eval", "date", "OrderedDict", "set", "complex", "builtin"],
)
def test_what_needs_an_import_is_refused_and_does_nothing(
    value: Any, protocol: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"segments": [], "x": value}, protocol)
    with pytest.raises(NotPlain, match="more than plain containers"):
        loads(data)
    assert not list(tmp_path.iterdir())


def test_no_opcode_of_the_reader_imports_or_calls() -> None:
    known = {bytes([code]).decode("latin-1") for code, step in enumerate(plain_pickle._STEPS) if step is not None}
    names = {opcode.name for opcode in pickletools.opcodes if opcode.code in known}
    acting = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD"}
    acting |= {"EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "NEXT_BUFFER"}
    assert not names & acting
    assert len(names) == len(known)


def said_of(data: bytes) -> str:
    """Why it is refused; nothing if it is read."""
    try:
        loads(data)
    except NotPlain as error:
        return str(error)
    return ""


WHOLE = pickle.dumps({"segments": [{"blocks": [(1, 2.5, "text" * 90, b"bytes", None, True)], "n": 2**70}]}, 4)


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(NotPlain):
        loads(WHOLE[:length])


@checked
@given(st.binary(max_size=200))
def test_garbage_is_refused_or_harmless(data: bytes) -> None:
    assert "\n" not in said_of(data)


@checked
@given(st.data())
def test_a_damaged_byte_is_refused_or_harmless(data: st.DataObject) -> None:
    damaged = bytearray(WHOLE)
    damaged[data.draw(st.integers(0, len(WHOLE) - 1))] = data.draw(st.integers(0, 255))
    assert "\n" not in said_of(bytes(damaged))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x80\x09.", "protocol 9"),
        (b"\x8b\xff\xff\xff\x7f.", "more than plain"),  # LONG4
        (b"\x8a\xff" + b"\x01" * 255 + b".", "integer of 255 bytes"),
        (b"I" + b"9" * 5000 + b"\n.", "integer of 5000 digits"),
        (b"X\xff\xff\xff\xff.", "truncated"),
        (b"\x8d" + b"\xff" * 8 + b".", "truncated"),
        (b"\x95" + b"\xff" * 8 + b"K\x01", "truncated"),
        (b"}K\x01K\x02s.", "a dict key that is a int"),
        (b"}(]K\x02u.", "a dict key that is a list"),
        (b"]K\x01K\x02s.", "items for no dict"),
        (b"h\x05.", "damaged"),
        (b"t.", "damaged"),
        (b".", "damaged"),
    ],
)
def test_hostile_programs_are_named(data: bytes, why: str) -> None:
    with pytest.raises(NotPlain, match=why):
        loads(data)


def test_small_programs_cost_little() -> None:
    start_s = time.process_time()
    assert loads(b"]r\xff\xff\xff\xff.") == []  # pickle makes room for 2**32 memos
    value = loads(b")" + b"\x85" * 200_000 + b".")  # nested 200,000 deep
    assert isinstance(value, tuple)
    doubled = b"]q\x00" + b"".join(b"(h%ch%cl\x94" % (i, i) for i in range(40)) + b"."
    loads(doubled)  # 2**40 leaves, if one would walk them
    assert time.process_time() - start_s < 2


def test_containers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_CONTAINERS", 100)
    with pytest.raises(NotPlain, match="more than 100 containers"):
        loads(pickle.dumps([[] for _ in range(101)], 4))
