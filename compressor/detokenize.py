"""Token ids → text while they come: the pieces joined are what the tokenizer makes of the whole."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT = 8
"""Tokens decoded again together with new ones: how a token is spelt can depend on those before it."""
LONGEST_WAIT = 4 * CONTEXT
"""Tokens to wait for a character to be completed; it has four bytes, but a tokenizer that falls back to bytes shows a
whole row of characters as broken while the last one is unfinished."""
UNFINISHED = 3
"""Bytes that an unfinished character has at most, and so the replacement characters that may still turn into it."""


class Detokenizer:
    """The text of one growing list of tokens, piece by piece, without special tokens.

    A character whose bytes are spread over several tokens comes when it is complete; bytes that never become one are
    replacement characters, as in `tokenizer.decode`. The work for a token does not grow with the text.

    Args:
        after: the tokens that the text continues, whose own text is not given out. Without them it is a text of its
            own, at whose beginning some tokenizers (Llama 2, Mistral) take a space away.
    """

    def __init__(self, tokenizer: Any, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last tokens, those whose text is out among them
        self._out = 0  # characters of the window's text that are out
        for token in reversed(after[-LONGEST_WAIT:]):
            text = self._decode([token])
            # Any token with a text will do, as long as it is whole: bytes of a half character would become part of
            # this text as soon as its own bytes complete or contradict them.
            if text and REPLACEMENT not in text:
                self._window, self._out = [token], len(text)
                break

    def add(self, tokens: Sequence[int], stop: str | None = None) -> str:
        """The text that has become certain with `tokens`.

        `stop`: how the text ends with them, as `Output.stop` says it. With "eos" the last one has ended the text and
        is not part of it, also where the tokenizer does not know it as special.
        """
        if stop == "eos":
            tokens = tokens[:-1]
        return "".join(self._add(tokens[i : i + CONTEXT]) for i in range(0, len(tokens), CONTEXT))

    def _add(self, tokens: Sequence[int]) -> str:
        self._window += tokens
        text = self._decode(self._window)
        certain = len(text.rstrip(REPLACEMENT))
        waiting = certain < len(text)
        if waiting and len(self._window) > LONGEST_WAIT:  # no character at all
            certain, waiting = max(certain, len(text) - UNFINISHED), False
        fresh = text[self._out : certain]
        self._out = max(self._out, certain)
        if not waiting and len(self._window) > 2 * CONTEXT:
            self._trim(text)
        return fresh

    def finish(self) -> str:
        """What was held back: an unfinished character."""
        text = self._decode(self._window)[self._out :]
        self._window, self._out = [], 0
        return text

    def _trim(self, text: str) -> None:
        """Forget the first tokens, where that does not cut a character in two."""
        held = len(text) - self._out
        for size in range(CONTEXT, CONTEXT + UNFINISHED + 1):
            rest = self._decode(self._window[-size:])
            if len(rest) >= held and text.endswith(rest):
                self._window, self._out = self._window[-size:], len(rest) - held
                return

    def _decode(self, tokens: list[int]) -> str:
        # Cleaning up would change text that is out already.
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
