"""One answer from a bundle, for the command line."""

import time
from pathlib import Path
from typing import Any, cast

from compressor.bundle import Bundle
from compressor.decode import Law
from compressor.errors import UsageError
from compressor.text import is_unicode


def generate(
    path: Path,
    prompt: str,
    *,
    proposer: str,
    k: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    raw: bool,
) -> dict[str, Any]:
    """Continue `prompt` with the bundle at `path`; plain JSON values.

    The prompt goes through the tokenizer's chat template as one user message, unless `raw` or there is none.
    Keys: ``text``, ``token_ids``, ``prompt_tokens``, ``chat_template`` (whether it was used), ``cycles``,
    ``accepted_per_position`` (one entry a cycle), ``tokens_per_cycle``, ``stop``, ``seconds``, ``tokens_per_second``.
    Raises CompressError for a bundle that cannot be read, UsageError for settings the runner refuses.
    """
    law = Law(temperature=temperature, top_k=top_k, top_p=top_p)
    bundle = Bundle.open(path)
    tokenizer = bundle.tokenizer()
    if not is_unicode(prompt):
        raise UsageError("--prompt: holds bytes that are not UTF-8")
    chat = not raw and tokenizer.chat_template is not None
    if chat:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        ids = tokenizer(prompt).input_ids
    ids = cast(list[int], ids)
    runner = bundle.runner(proposer=proposer, num_speculative_tokens=k)
    start = time.perf_counter()
    output = runner.generate(ids, max_new_tokens=max_new_tokens, law=law, seed=seed)
    seconds = time.perf_counter() - start
    count = len(output.token_ids)
    return {
        "text": tokenizer.decode(output.token_ids, skip_special_tokens=True),
        "token_ids": list(output.token_ids),
        "prompt_tokens": len(ids),
        "chat_template": chat,
        "cycles": output.cycles,
        "accepted_per_position": [list(entry) for entry in output.accepted_per_position],
        "tokens_per_cycle": (output.cycles + output.accepted) / output.cycles,
        "stop": output.stop,
        "seconds": seconds,
        "tokens_per_second": count / seconds,
    }


def statistics(answer: dict[str, Any]) -> str:
    """One line on how an answer was made."""
    count, cycles = len(answer["token_ids"]), answer["cycles"]
    template = "" if answer["chat_template"] else ", no chat template"
    return (
        f"[{count} tokens in {cycles} cycles, {answer['tokens_per_cycle']:.2f} a cycle, "
        f"{answer['tokens_per_second']:.1f} tokens/s{template}]"
    )
