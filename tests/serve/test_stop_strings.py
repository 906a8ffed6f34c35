"""A text ends before its first stop string."""

import random

import pytest

from compressor.serve.stop_strings import StopStrings


def cut(text, stops, size):
    """The pieces let out, and whether the text was stopped."""
    cutter, pieces = StopStrings(stops), []
    for i in range(0, len(text), size):
        pieces.append(cutter.add(text[i : i + size]))
        if cutter.found:
            return pieces, True
    return [*pieces, cutter.finish()], False


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["e t"], "on"),
        ("aaab", ["aab"], "a"),
        ("ababac rest", ["abac"], "ab"),
        ("abcd", ["bcd", "c"], "ab"),  # c is complete first
        ("abc", ["c", "bc"], "a"),  # complete together: the one that began first
        ("\n\nx", ["\n\n"], ""),
    ],
)
def test_the_text_before_the_stop_string_is_left_however_it_is_cut_up(text, stops, left, size):
    pieces, found = cut(text, stops, size)
    assert ("".join(pieces), found) == (left, True)


def test_a_possible_beginning_is_held_back_and_released_when_it_is_none():
    cutter = StopStrings(["END"])
    assert [cutter.add(piece) for piece in ("a E", "N", "d E", "N")] == ["a ", "", "ENd ", ""]
    assert (cutter.finish(), cutter.found) == ("EN", False)


def test_without_stop_strings_nothing_is_held_back():
    assert cut("some text", [], 4) == (["some", " tex", "t", ""], False)


@pytest.mark.parametrize("seed", range(50))
def test_pieces_make_no_difference(seed):
    choose = random.Random(seed)
    text = "".join(choose.choices("ab", k=40))
    stops = ["".join(choose.choices("ab", k=choose.randint(3, 7))) for _ in range(3)]
    whole, stopped = cut(text, stops, len(text))
    for size in (1, 2, 3, 7):
        pieces, found = cut(text, stops, size)
        assert ("".join(pieces), found) == ("".join(whole), stopped)
    assert not any(stop in "".join(whole) for stop in stops)
