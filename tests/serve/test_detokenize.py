"""Tokens become text as they come."""

import random

import pytest
import tiny_models as tiny

from compressor import detokenize
from compressor.detokenize import Detokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve\n\tend " * 5
BYTE_LEVEL = tiny.tokenizer()


SENTENCEPIECE = tiny.sentencepiece(
    [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "▁is", "s", "a", "."]
)


def spell(*words):
    """Ids of SENTENCEPIECE: of a word that is in it, and of the bytes of any other."""
    known = SENTENCEPIECE.get_vocab()
    parts = [[word] if word in known else [f"<0x{byte:02X}>" for byte in word.encode()] for word in words]
    return [known[token] for part in parts for token in part]


def pieces(tokenizer, tokens, size=1, after=()):
    text = Detokenizer(tokenizer, after)
    return [*(text.add(tokens[i : i + size]) for i in range(0, len(tokens), size)), text.finish()]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_pieces_joined_are_the_whole_and_no_character_comes_in_parts(size):
    tokens = BYTE_LEVEL(TEXT).input_ids
    assert len(tokens) > len(TEXT)  # several tokens a character
    parts = pieces(BYTE_LEVEL, tokens, size)
    assert "".join(parts) == TEXT == BYTE_LEVEL.decode(tokens)
    assert all(part in TEXT for part in parts)


def test_decoding_token_by_token_would_break_characters():
    assert "".join(BYTE_LEVEL.decode([token]) for token in BYTE_LEVEL(TEXT).input_ids) != TEXT


def test_a_character_comes_with_its_last_byte():
    a, *euro = BYTE_LEVEL("a€").input_ids
    assert pieces(BYTE_LEVEL, [a, *euro]) == ["a", "", "", "€", ""]


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_give_what_the_tokenizer_makes_of_them(seed):
    tokens = random.Random(seed).choices(range(tiny.VOCABULARY), k=300)  # broken UTF-8, special tokens, unused ids
    for size in (1, 4):
        assert "".join(pieces(BYTE_LEVEL, tokens, size)) == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)


def test_special_tokens_are_left_out():
    assert "".join(pieces(BYTE_LEVEL, [1, *BYTE_LEVEL("ab").input_ids, 2])) == "ab"


def test_an_unfinished_character_at_the_end_is_a_replacement_character():
    tokens = BYTE_LEVEL("a€").input_ids[:-1]
    assert pieces(BYTE_LEVEL, tokens) == ["a", "", "", "\ufffd"] and BYTE_LEVEL.decode(tokens) == "a\ufffd"


def test_spaces_and_bytes_of_a_sentencepiece_tokenizer():
    tokens = spell("▁the", "▁cat", "s", "世界€", "▁", "世界€世界€世界€", "▁the", ".") * 3
    assert "".join(pieces(SENTENCEPIECE, tokens)) == SENTENCEPIECE.decode(tokens)
    assert SENTENCEPIECE.decode(tokens).startswith("the cats世界€ 世界€世界€世界€ the. the cats")


# ------------------------------------------------------------------ a text that continues another

CONTINUED = [
    (["▁cat", "▁is"], ["▁the", "s", "▁cat"], " thes cat"),
    (["▁cat", "▁"], ["▁the"], " the"),
    (["▁cat", "世界\n"], ["▁the", "世", "."], " the世."),
    (["▁cat", "\n"], ["\n", "€", "s"], "\n€s"),
    (["▁is", "</s>"], ["▁the"], " the"),
    (["▁is"], ["s", "▁the"], "s the"),
]


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(("prompt", "answer", "says"), CONTINUED, ids=range(len(CONTINUED)))
def test_a_continuation_is_what_the_whole_text_has_more_than_the_prompt(prompt, answer, says, size):
    before, tokens = spell(*prompt), spell(*answer)
    assert "".join(pieces(SENTENCEPIECE, tokens, size, before)) == says
    whole, first = (SENTENCEPIECE.decode(ids, skip_special_tokens=True) for ids in (before + tokens, before))
    assert whole == first + says


@pytest.mark.parametrize("after", [(), spell("<s>")], ids=["nothing", "no text"])
def test_a_text_of_its_own_begins_without_the_space_that_the_tokenizer_put_there(after):
    assert "".join(pieces(SENTENCEPIECE, spell("▁the", "▁cat"), after=after)) == "the cat"


HALF = spell("▁cat", "a", "€")[:-1]  # the last byte of € is missing
ANSWERS = {
    "completes it": spell("€", "▁the")[-2:],
    "goes on": spell("▁the"),
    "breaks it": spell("\n", "▁the", "€", "."),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_half_a_character_of_the_prompt_does_not_become_part_of_the_answer(answer):
    alone = pieces(SENTENCEPIECE, spell("a") + answer)
    assert "".join(pieces(SENTENCEPIECE, answer, after=HALF)) == "".join(alone).removeprefix("a")


def test_half_a_character_that_counts_as_said_would_swallow_the_answer():
    text = Detokenizer(SENTENCEPIECE)
    text._window, text._out = [*HALF], len(SENTENCEPIECE.decode(HALF))
    assert "".join(text.add([token]) for token in ANSWERS["completes it"]) + text.finish() != "\ufffd the"
    assert "".join(pieces(SENTENCEPIECE, ANSWERS["completes it"], after=HALF)) == "\ufffd the"


@pytest.mark.parametrize("seed", range(20))
def test_a_byte_level_answer_does_not_depend_on_the_prompt(seed):
    choose = random.Random(seed)
    before, tokens = (choose.choices(range(tiny.VOCABULARY), k=40) for _ in range(2))
    assert pieces(BYTE_LEVEL, tokens, after=before) == pieces(BYTE_LEVEL, tokens)


@pytest.mark.parametrize(("stop", "says"), [("eos", "né"), ("length", "né!"), ("grammar", "né!"), (None, "né!")])
def test_the_token_that_ended_a_text_is_not_part_of_it(stop, says):
    text = Detokenizer(BYTE_LEVEL)
    assert text.add(BYTE_LEVEL("né!").input_ids, stop) + text.finish() == says


def test_the_work_for_a_token_does_not_grow_with_the_text(monkeypatch):
    sizes = []
    decode = BYTE_LEVEL.decode
    monkeypatch.setattr(BYTE_LEVEL, "decode", lambda ids, **kw: sizes.append(len(ids)) or decode(ids, **kw))
    pieces(BYTE_LEVEL, BYTE_LEVEL(TEXT * 20).input_ids)
    pieces(BYTE_LEVEL, BYTE_LEVEL.convert_tokens_to_ids(["ÿ"]) * 1000)  # the byte FF, never part of a character
    assert max(sizes) <= detokenize.LONGEST_WAIT + detokenize.CONTEXT
