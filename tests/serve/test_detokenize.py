"""Tokens become text as they come."""

import random

import pytest
import tiny_models as tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from compressor import detokenize
from compressor.detokenize import Detokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve\n\tend " * 5
BYTE_LEVEL = tiny.tokenizer()


def sentencepiece() -> PreTrainedTokenizerFast:
    """Like Llama 2: ▁ for spaces, bytes of unknown characters one by one, the first space taken away."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "a", "."]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(strip)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def pieces(tokenizer, tokens, size=1):
    text = Detokenizer(tokenizer)
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
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids
    euro = [ids(f"<0x{byte:02X}>") for byte in "世界€".encode()]
    tokens = [ids("▁the"), ids("▁cat"), ids("s"), *euro, ids("▁"), *euro, *euro, *euro, ids("▁the"), ids(".")] * 3
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)
    assert tokenizer.decode(tokens).startswith("the cats世界€ 世界€世界€世界€ the. the cats")


def test_the_work_for_a_token_does_not_grow_with_the_text(monkeypatch):
    sizes = []
    decode = BYTE_LEVEL.decode
    monkeypatch.setattr(BYTE_LEVEL, "decode", lambda ids, **kw: sizes.append(len(ids)) or decode(ids, **kw))
    pieces(BYTE_LEVEL, BYTE_LEVEL(TEXT * 20).input_ids)
    pieces(BYTE_LEVEL, BYTE_LEVEL.convert_tokens_to_ids(["ÿ"]) * 1000)  # the byte FF, never part of a character
    assert max(sizes) <= detokenize.LONGEST_WAIT + detokenize.CONTEXT
