"""The evaluation prompts as token ids, for measuring acceptance."""

from __future__ import annotations

from typing import Any

from compressor.calibration.prompts import encode, evaluation_prompts, interleaved
from compressor.errors import UsageError

# Answers that repeat their prompt (where an n-gram proposer shines) and free ones (where it does not), in turn, so that
# a small number of prompts is a fair mix. Fixed: figures of different runs are about the same prompts.
CATEGORY_ORDER = (
    *("code-edit", "explain", "extract", "maths", "rewrite", "story", "summarise", "code"),
    *("reading", "continue", "json", "dialogue", "table", "plan", "translate"),
)
COPYING = frozenset({"code-edit", "extract", "rewrite", "summarise", "reading"})


def acceptance_order() -> list[dict[str, Any]]:
    """All evaluation prompts, one of each category in turn by CATEGORY_ORDER."""
    return interleaved(sorted(evaluation_prompts(), key=lambda prompt: CATEGORY_ORDER.index(prompt["category"])))


def acceptance_prompts(tokenizer: Any, n: int) -> list[list[int]]:
    """Token ids of the first `n` prompts of `acceptance_order`, each ready for the model's answer.

    Chat template and assistant turn as in `calibration.prompts.encode`. Raises UsageError when there are not n prompts.
    """
    prompts = acceptance_order()
    if not 1 <= n <= len(prompts):
        raise UsageError(f"measure.acceptance.prompts: {n} is not between 1 and {len(prompts)}, the prompts there are")
    return [encode(prompt, tokenizer) for prompt in prompts[:n]]
