"""One answer from a bundle, for the command line."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from compressor.bundle import Bundle
from compressor.bundle.api import check_settings
from compressor.decode import Adaptive, Law, Runner
from compressor.decode.law import Grammar
from compressor.decode.length import Length
from compressor.detokenize import Detokenizer
from compressor.errors import UsageError
from compressor.proposers.base import MAX_NODES
from compressor.text import is_unicode

ENDS = {"eos": "the model", "length": "the limit", "grammar": "the grammar"}
"""`Output.stop` in words."""


@dataclass(frozen=True)
class Settings:
    """How a bundle is run: the arguments of `Bundle.runner`."""

    proposer: str = "ngram"
    k: int | Length = 3
    branching: tuple[int, ...] | None = None
    rule: str = "exact"
    kernel: str = "auto"

    def runner(self, bundle: Bundle) -> Runner:
        return bundle.runner(self.proposer, self.k, branching=self.branching, rule=self.rule, kernel=self.kernel)


def settings(proposer: str, k: str, branching: str | None, rule: str, kernel: str) -> Settings:
    """The settings as the command line spells them. Raises UsageError for what no bundle could be run with."""
    levels = _branching(branching)
    made = Settings(proposer, _length(k, levels), levels, rule, kernel)
    check_settings(made.k, levels, rule, kernel)
    return made


def _length(text: str, branching: tuple[int, ...] | None) -> int | Length:
    """`--k`: a number from 1 to `MAX_NODES`, or `auto`. Raises UsageError."""
    if text == "auto":  # of a tree it decides how many levels are drafted
        return Adaptive() if branching is None else Adaptive(len(branching))
    if not _is_size(text):
        raise UsageError(f"--k {text}: neither a number from 1 to {MAX_NODES} nor auto")
    return int(text)


def _branching(text: str | None) -> tuple[int, ...] | None:
    """`--branching`: numbers from 1 to `MAX_NODES`, as in 3,2,1. Raises UsageError."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(map(_is_size, parts)):
        raise UsageError(f"--branching {text}: not a list of numbers from 1 to {MAX_NODES}, as in 3,2,1")
    return tuple(map(int, parts))


def _is_size(text: str) -> bool:
    return re.fullmatch("[0-9]{1,4}", text) is not None and 1 <= int(text) <= MAX_NODES


def generate(
    path: Path,
    prompt: str,
    settings: Settings,
    sampling: dict[str, Any],
    *,
    max_new_tokens: int,
    json_schema: Path | None = None,
    regex: str | None = None,
    seed: int = 0,
    raw: bool = False,
    write: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Continue `prompt` with the bundle at `path`; plain JSON values. `write` gets the text as it grows.

    The prompt goes through the tokenizer's chat template as one user message, unless `raw` or there is none.
    `sampling` are the fields of `Law`; `json_schema` is a file.
    Keys: ``text`` (without the token that ended it), ``token_ids`` (with it), ``prompt_tokens``, ``chat_template``
    (whether it was used), ``lossy`` (whether the acceptance rule changes the law), ``cycles``,
    ``accepted_per_position`` (one entry a cycle), ``tokens_per_cycle``, ``stop``, ``seconds``, ``tokens_per_second``.
    Raises CompressError for a bundle that cannot be read, UsageError for settings the runner refuses.
    """
    Law(**sampling)  # refuses before anything is loaded
    schema = None if json_schema is None else _schema(json_schema)
    bundle = Bundle.open(path)
    tokenizer = bundle.tokenizer()
    ids, chat = _encode(tokenizer, prompt, raw)
    runner = settings.runner(bundle)
    law = Law(**sampling, grammar=_grammar(runner, tokenizer, schema, regex))
    text, words = Detokenizer(tokenizer, after=() if chat else ids), []
    start = time.perf_counter()
    for step in runner.stream(ids, max_new_tokens, law, seed):
        fresh, output = step
        words.append(text.add(fresh, output.stop))
        write(words[-1])
    words.append(text.finish())
    write(words[-1])
    seconds = time.perf_counter() - start
    return {
        "text": "".join(words),
        "token_ids": list(output.token_ids),
        "prompt_tokens": len(ids),
        "chat_template": chat,
        "lossy": settings.rule != "exact",
        "cycles": output.cycles,
        "accepted_per_position": [list(entry) for entry in output.accepted_per_position],
        "tokens_per_cycle": (output.cycles + output.accepted) / output.cycles,
        "stop": output.stop,
        "seconds": seconds,
        "tokens_per_second": len(output.token_ids) / seconds,
    }


def _encode(tokenizer: Any, prompt: str, raw: bool) -> tuple[list[int], bool]:
    """Token ids of the prompt, and whether the chat template made them."""
    if not is_unicode(prompt):
        raise UsageError("--prompt: holds bytes that are not UTF-8")
    if raw or tokenizer.chat_template is None:
        return tokenizer(prompt).input_ids, False
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return cast(list[int], ids), True


def _schema(file: Path) -> str:
    """The text of `--json-schema`. Raises UsageError for a file that cannot be read or is not JSON."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UsageError(f"--json-schema {file}: cannot be read ({reason})") from None
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema {file}: not JSON ({error}); give a JSON Schema") from None
    return text


def _grammar(runner: Runner, tokenizer: Any, schema: str | None, regex: str | None) -> Grammar | None:
    from compressor.decode import grammar

    stops, size = runner.decoder.stops, runner.decoder.vocab_size
    if schema is not None:
        return grammar.json_schema(schema, tokenizer, size, stops)
    return None if regex is None else grammar.regex(regex, tokenizer, size, stops)


def statistics(answer: dict[str, Any]) -> str:
    """One line on how an answer was made."""
    count, cycles = len(answer["token_ids"]), answer["cycles"]
    template = "" if answer["chat_template"] else ", no chat template"
    lossy = ", LOSSY acceptance" if answer["lossy"] else ""
    return (
        f"[{count} tokens, ended by {ENDS[answer['stop']]}; {cycles} cycles that verified "
        f"{answer['tokens_per_cycle']:.2f} tokens each, accepted {acceptance(answer['accepted_per_position'])}, "
        f"{answer['tokens_per_second']:.1f} tokens/s{template}{lossy}]"
    )


def acceptance(cycles: list[list[int]]) -> str:
    """Accepted per position among the cycles that drafted it, as in .62/.48/.30; none where nothing was drafted."""
    depth = max(map(len, cycles), default=0)
    drafted = [[entry[i] for entry in cycles if len(entry) > i] for i in range(depth)]
    return "/".join(f"{sum(hits) / len(hits):.2f}".lstrip("0") for hits in drafted) or "none"
