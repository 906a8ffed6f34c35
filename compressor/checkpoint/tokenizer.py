"""The tokenizer of a checkpoint folder, or one line that says why there is none."""

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from compressor.checkpoint.config import TRANSFORMERS_ERRORS, read_config
from compressor.errors import CompressError


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer in `folder`, its chat template tried on one message.

    Raises CompressError naming the folder for files that are missing or damaged, or a template that does not parse.
    """
    read_config(folder)  # transformers reads it to choose the class: what is wrong with it should be said of it
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, *TRANSFORMERS_ERRORS) as error:
        raise CompressError(f"{folder}: no usable tokenizer ({_reason(error)})") from None
    if tokenizer.chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        except (TemplateError, TypeError) as error:
            raise CompressError(f"{folder}: the tokenizer's chat template cannot be used ({_reason(error)})") from None
    return tokenizer


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
