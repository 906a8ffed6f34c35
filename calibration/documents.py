"""One document → token ids: plain text as the tokenizer does it, a conversation through its chat template."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from compressor.calibration.packing import first_line
from compressor.errors import CompressError

Message = dict[str, str]


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Ids of plain text, with the special tokens that the tokenizer adds by itself (a BOS for some families)."""
    return tokenizer(text, verbose=False).input_ids  # verbose: no warning about texts longer than one row


def encode_messages(messages: list[Message], tokenizer: Any, *, answer: bool = False) -> list[int]:
    """Ids of a conversation in the tokenizer's chat template; `answer` opens the assistant's next turn.

    Special tokens come from the template alone: adding the tokenizer's own would begin the row with two BOS.
    Raises jinja2.TemplateError when the template refuses the roles.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def check_field(value: Any, where: str) -> None:
    """Raise CompressError naming `where` unless the value is text (str) or messages (list of {role, content})."""
    if isinstance(value, str):
        _check_unicode(value, where)
        return
    if not isinstance(value, list) or not value or not all(_is_message(m) for m in value):
        raise CompressError(f"{where}: must be a string, or a list of messages, each with a string role and content")
    for message in value:
        _check_unicode(message["content"], where)


def encode_field(value: Any, tokenizer: Any, where: str, *, answer: bool = False) -> list[int]:
    """Ids of a user's text or messages, with `answer` ready for the assistant's; CompressError naming `where` for what
    `check_field` or the template refuses."""
    check_field(value, where)
    if isinstance(value, str):
        return encode_text(value, tokenizer)
    if not tokenizer.chat_template:
        raise CompressError(f"{where}: holds messages, but the tokenizer has no chat template; give text instead")
    try:
        return encode_messages(value, tokenizer, answer=answer)
    except TemplateError as error:
        raise CompressError(f"{where}: the chat template refuses these messages: {first_line(error)}") from error


def _check_unicode(text: str, where: str) -> None:
    """JSON can escape half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CompressError(f"{where}: no Unicode text ({error.reason} at character {error.start}); mend it") from error


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )
