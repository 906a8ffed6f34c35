"""Prompts that the target writes itself: opened at the user's turn, a chat model continues with what users ask.

(Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", arXiv 2406.08464.)
No two are alike, where prompts made of templates repeat themselves after a few thousand.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from compressor.calibration.documents import encode_messages
from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.errors import CompressError, UsageError, naming
from compressor.train import answers
from compressor.ui import UI

MARK = "\N{SNOWMAN}"
MAX_TOKENS = 96
"""Longer turns are left out: most of them ramble."""
LEAST_CHARACTERS = 12
PART = 1536
"""Turns written between two saves: eight times the rows written at a time, because many of them are short."""
ROUNDS = 4
"""Times as many turns as are wanted may be written at most: a model that stays silent or repeats itself ends here."""


def opening(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to where a first user's words begin. Raises UsageError for a tokenizer without
    a chat template, and for a template that does not show the user's words as they are."""
    if not tokenizer.chat_template:
        raise UsageError("answers.self_written: needs a chat template, which the tokenizer lacks; set it to 0")
    text = tokenizer.decode(encode_messages([{"role": "user", "content": MARK}], tokenizer))
    if text.count(MARK) != 1:
        raise UsageError("answers.self_written: the chat template does not show the user's words once; set it to 0")
    return tokenizer(text.partition(MARK)[0], add_special_tokens=False).input_ids


def write(decoder: Decoder, tokenizer: Any, count: int, folder: Path, *, seed: int, ui: UI) -> list[str]:
    """`count` distinct first turns of users, in the order written. Parts that `folder` holds already are not written
    again. Raises CompressError where the target does not come up with as many; else as `opening`."""
    start = opening(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, None] = {}
    with ui.progress("prompts written by the target", count) as bar:
        for number in range(-(-ROUNDS * count // PART)):
            before = len(found)
            for text in _part(decoder, tokenizer, start, folder / f"turns-{number:04}.json", f"{seed}/{number}"):
                found[text] = None
            bar.advance(min(count, len(found)) - min(count, before))
            if len(found) >= count:
                return list(found)[:count]
    raise CompressError(
        f"answers.self_written: the target wrote {len(found)} distinct prompts where {count} are wanted; lower it"
    )


def _part(decoder: Decoder, tokenizer: Any, start: list[int], file: Path, seed: str) -> list[str]:
    if file.is_file():
        with suppress(ValueError):  # what cannot be read gets the error below
            texts = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
                return texts
        raise CompressError(f"{file}: damaged; remove it")
    turns = answers.Writing(
        decoder,
        [start] * PART,
        max_new_tokens=MAX_TOKENS,
        law=Law(temperature=1.0),
        seed=seed,
        stops=decoder.stops,
    ).run()
    finished = (turn for turn in turns if turn[-1] in decoder.stops)
    texts = [tokenizer.decode(turn, skip_special_tokens=True).strip() for turn in finished]
    kept = [text for text in texts if len(text) >= LEAST_CHARACTERS]
    new = file.with_suffix(".new")
    with naming(new), new.open("w", encoding="utf-8") as opened:
        json.dump(kept, opened, ensure_ascii=False)
        opened.flush()
        os.fsync(opened.fileno())
    new.replace(file)
    return kept
