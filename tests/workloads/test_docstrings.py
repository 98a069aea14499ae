"""The corpus is the same on every load, large enough for every preset, and its sizes are the ones asked for."""

from __future__ import annotations

import gc

import pytest

from workloads.docstrings import END, UNKNOWN, Pair, Vocabulary, load_pairs, read_pairs, tokenise

SOURCE = '''
def outer_one(getFile):
    """Return the file. And stop.

    More that is no summary.
    """
    if getFile:
        async def inner(x): \x0c
            "The inner function here."
            return x2
    return HTTPServer

class Thing:
    def undocumented(self):
        return 1

    def short(self):
        """Too short"""
        return 1

    def doctest(self):
        """>>> Thing().doctest() == 1"""
        return 1

    def only_a_docstring(self):
        """There is no code here."""

    def foreign(self):
        """Günther wrote this one."""
        return 1
'''


@pytest.fixture(scope="module")
def pairs() -> tuple[Pair, ...]:
    return load_pairs()


def _words(pairs: tuple[Pair, ...]) -> set[str]:
    return {word for pair in pairs for word in (*pair.source, *pair.summary)}


def test_identifiers_fall_into_lower_case_words():
    assert " ".join(tokenise("HTTPServer.getFile_name(x2)")) == "http server . get file name ( x 2 )"


def test_a_pair_is_a_function_without_its_docstring_and_the_first_line_of_it():
    outer, inner = read_pairs(SOURCE)
    assert outer.summary == tokenise("Return the file. And stop.")
    assert outer.source[:7] == ("def", "outer", "one", "(", "get", "file", ")")
    assert outer.source[-3:] == ("return", "http", "server")
    assert "summary" not in outer.source
    assert inner == Pair(tokenise("async def inner(x): return x2"), tokenise("The inner function here."))


def test_loading_twice_gives_the_same_pairs(pairs):
    assert load_pairs.__wrapped__() == pairs
    assert gc.isenabled()


def test_there_is_enough_to_train_on(pairs):
    assert len(pairs) > 3000
    assert len({pair.summary for pair in pairs}) > 2500
    assert sum(len(pair.source) for pair in pairs) > 250_000


def test_no_pair_is_empty_and_no_source_holds_its_summary(pairs):
    assert all(len(pair.source) >= 5 and len(pair.summary) >= 3 for pair in pairs)
    leaks = sum(" ".join(pair.summary) in " ".join(pair.source) for pair in pairs)
    assert leaks < len(pairs) / 100


@pytest.mark.parametrize("size", [2, 100, 5120, 20_000])
def test_a_vocabulary_has_the_size_asked_for(pairs, size):
    vocabulary = Vocabulary(pairs, size)
    assert len(vocabulary) == size
    assert len(vocabulary.decode(range(1, size))) == min(size - 2, len(_words(pairs)))


def test_a_vocabulary_depends_on_no_order(pairs):
    first, second = Vocabulary(pairs, 500), Vocabulary(pairs[::-1], 500)
    assert first.decode(range(1, 500)) == second.decode(range(1, 500))


def test_frequent_words_come_first_and_ties_go_by_the_alphabet():
    pairs = [Pair(("b", "a", "c", "c"), ("d", "d", "a", "b"))]
    assert Vocabulary(pairs, 6).decode(range(1, 6)) == ("a", "b", "c", "d")


def test_a_vocabulary_without_room_is_refused():
    with pytest.raises(ValueError, match="at least 2 tokens, not 1"):
        Vocabulary([], 1)


def test_encoding_pads_on_the_left_and_cuts_on_the_right():
    vocabulary = Vocabulary([Pair(("a", "a", "b"), ("a", "b", "c"))], 5)
    a, b, c = (vocabulary.token(word) for word in "abc")
    assert vocabulary.encode(("a", "x", "c"), 5).tolist() == [END, END, a, UNKNOWN, c]
    assert vocabulary.encode(("a", "b", "c"), 2).tolist() == [a, b]


def test_decoding_stops_at_the_end_and_leaves_out_what_has_no_text():
    vocabulary = Vocabulary([Pair(("a",), ("b",))], 6)
    a, b = vocabulary.token("a"), vocabulary.token("b")
    assert vocabulary.decode([a, UNKNOWN, 5, b, END, a]) == ("a", "b")
    assert vocabulary.decode([END, a]) == ()
