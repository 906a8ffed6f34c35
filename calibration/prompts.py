"""The prompts shipped with the package, written for it, and their token ids.

Two disjoint sets: the calibration set is answered by the target to make calibration rows; the evaluation set serves
quality rows and acceptance, so no figure in a passport is measured on text the quantizer has fitted.
"""

from __future__ import annotations

import hashlib
import json
import random
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import TemplateError

from compressor.calibration.documents import Message, encode_messages, encode_text

Prompt = dict[str, Any]  # id, category, and either messages or text (a beginning for the model to continue)


@cache
def _read(name: str) -> tuple[Prompt, ...]:
    lines = resources.files("compressor.calibration").joinpath(name).read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def calibration_prompts() -> list[Prompt]:
    """The prompts whose answers calibrate, in file order."""
    return list(_read("prompts.jsonl"))


def evaluation_prompts() -> list[Prompt]:
    """The prompts for measuring, disjoint from `calibration_prompts`, in file order."""
    return list(_read("evaluation_prompts.jsonl"))


def prompts_digest(prompts: list[Prompt]) -> str:
    """sha256 (hex) of the prompts as JSON lines with sorted keys."""
    text = "".join(json.dumps(prompt, sort_keys=True) + "\n" for prompt in prompts)
    return hashlib.sha256(text.encode()).hexdigest()


def interleaved(prompts: list[Prompt], rng: random.Random | None = None) -> list[Prompt]:
    """One of each category in turn until all are used, so that any beginning of the list is diverse.

    Without `rng` categories come in order of first appearance and prompts in list order; with it both are shuffled.
    """
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt["category"], []).append(prompt)
    groups = list(by_category.values())
    if rng is not None:
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
    deepest = max(map(len, groups), default=0)
    return [group[i] for i in range(deepest) for group in groups if i < len(group)]


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids after which the model writes its answer.

    Messages go through the chat template, with the assistant's turn opened; for a tokenizer without one the contents
    are joined by blank lines. Some templates know no system role: there the instruction opens the first user turn.
    """
    if "text" in prompt:
        return encode_text(prompt["text"], tokenizer)
    messages: list[Message] = prompt["messages"]
    if not tokenizer.chat_template:
        return encode_text("\n\n".join(message["content"] for message in messages) + "\n\n", tokenizer)
    try:
        return encode_messages(messages, tokenizer, answer=True)
    except TemplateError:
        if messages[0]["role"] != "system":
            raise
    system, user, *rest = messages
    opening = {"role": user["role"], "content": f"{system['content']}\n\n{user['content']}"}
    return encode_messages([opening, *rest], tokenizer, answer=True)
