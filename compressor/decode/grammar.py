"""Compiled grammars: JSON Schema, regular expressions and Lark, by llguidance, as masks over a model's vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.hf import from_tokenizer

from compressor.errors import CompressError, UsageError, brief

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# By default llguidance's mask holds only the canonical token of a text that the grammar forces, although it accepts
# every other spelling. The law would then depend on the tokenizer's merges, and the mask would contradict the matcher.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_LIMITS = LLParserLimits(verbose_errors=False)  # the verbose ones print the whole grammar

# An LLTokenizer takes up to a second to build, and every grammar of a tokenizer can use the same one. It is built anew
# where tokens were added since.
_tokenizers: WeakKeyDictionary[PreTrainedTokenizerFast, tuple[tuple[int, int | None], LLTokenizer]]
_tokenizers = WeakKeyDictionary()


class GrammarError(UsageError):
    """A grammar that compiled cannot be followed any further: it is the grammar's fault, and its author's to change."""


def json_schema(
    schema: dict[str, Any] | bool | str,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    stops: Collection[int] = (),
) -> CompiledGrammar:
    """JSON texts valid under `schema`, a JSON Schema (draft 2020-12) or its text.

    Properties come in the order of the schema, `format` is enforced, numbers in `const` and `enum` are spelled as in
    the schema, and whitespace is free; a top-level key "x-guidance" changes the last (llguidance, docs/json_schema.md).

    Args:
        tokenizer: a fast tokenizer.
        vocab_size: V of the logits. Ids from V on are cut off; padding behind the tokenizer's ids is never allowed.
        stops: ids that end a text, besides the tokenizer's eos_token_id. Allowed where the text is complete only.
            Other special tokens, and added ones in angle brackets such as <think>, are never part of a text.

    Raises UsageError for a schema that is damaged, unsatisfiable, or uses what llguidance does not support.
    """
    try:
        text = json.dumps(json.loads(schema) if isinstance(schema, str) else schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"schema: {brief(schema)} is not JSON ({error}); give a JSON Schema") from None
    return _compile("schema", schema, f"start: %json {text}", tokenizer, vocab_size, stops)


def regex(
    pattern: str, tokenizer: PreTrainedTokenizerFast, vocab_size: int, stops: Collection[int] = ()
) -> CompiledGrammar:
    """Texts that `pattern` matches from their first character to their last.

    The syntax is that of Rust's regex crate: Unicode classes, no look-around, no back-references. Arguments as for
    `json_schema`. Raises UsageError for a pattern that is invalid or unsupported.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # llguidance would drop the last backslash without a word
        raise UsageError(f"pattern: {brief(pattern)} ends in a lone backslash; double it or escape something")
    return _compile("pattern", pattern, f"start: /{regex_to_lark(pattern, '')}/", tokenizer, vocab_size, stops)


def lark(
    text: str, tokenizer: PreTrainedTokenizerFast, vocab_size: int, stops: Collection[int] = ()
) -> CompiledGrammar:
    """Texts of the context-free grammar `text`, in llguidance's dialect of Lark.

    Special tokens are allowed where the grammar names them. Arguments as for `json_schema`. Raises UsageError for a
    grammar that is invalid or unsupported.
    """
    return _compile("lark", text, text, tokenizer, vocab_size, stops)


class CompiledGrammar:
    """Which texts are allowed, for one tokenizer and one vocabulary: the `Grammar` protocol."""

    def __init__(self, start: LLMatcher, tokens: LLTokenizer, ends: frozenset[int], vocab_size: int) -> None:
        self.ends = ends
        self.vocab_size = vocab_size
        self.closed = frozenset(t for t in tokens.eos_tokens if t < vocab_size)  # ends to llguidance; only `ends` count
        self._limit = min(vocab_size, tokens.vocab_size)
        self._start = start  # never advanced: matchers are copies of it

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self, self._start.deep_copy())

    def spells(self, token: int) -> bool:
        """Whether `token` can be part of a text at all."""
        return 0 <= token < self._limit and token not in self.closed


class GrammarMatcher:
    """A grammar's state along one text: the `Matcher` protocol.

    `allowed` may be asked about the paths of a tree in any order. A cursor walks the tree: only the tokens by which two
    successive paths differ are rolled back and consumed.
    """

    def __init__(self, grammar: CompiledGrammar, engine: LLMatcher) -> None:
        self._grammar = grammar
        self._engine = engine
        self._length = 0  # of the committed text, in tokens
        self._ended = False
        self._drafted: list[int] = []  # consumed behind the committed text

    def allowed(self, path: Sequence[int]) -> torch.Tensor | None:
        """bool [V], on the CPU, the caller's own: the tokens that may follow the committed text and `path`; None where
        the grammar forbids `path`, or the text has ended.

        Raises GrammarError where llguidance gives up (its limits), or where no token continues an incomplete text.
        """
        # Nothing follows an end; whether it was allowed there makes no difference.
        if self._ended or not self._grammar.ends.isdisjoint(path) or self._follow(path) < len(path):
            return None
        bits = np.frombuffer(self._engine.compute_bitmask(), dtype=np.uint8)
        complete = self._engine.is_accepting()
        self._check()
        mask = np.unpackbits(bits, count=self._grammar.vocab_size, bitorder="little").view(np.bool_)  # pads or cuts
        mask[list(self._grammar.closed)] = False
        mask[list(self._grammar.ends)] = complete
        if not mask.any():
            raise GrammarError(
                "grammar: no token of the vocabulary continues the text, and it is not complete; "
                "change the grammar or the vocabulary"
            )
        return torch.from_numpy(mask)

    def commit(self, tokens: Sequence[int]) -> None:
        """Make `tokens` part of the text for good. Raises CompressError, the text unchanged, naming the first one that
        the grammar forbids and its position in the text."""
        body = list(takewhile(lambda token: token not in self._grammar.ends, tokens))
        good = 0 if self._ended else self._follow(body)
        ends = good == len(body) < len(tokens) and not self._ended and self._engine.is_accepting()
        self._check()
        good += ends
        if good < len(tokens):
            where = "follows the end of the text" if self._ended or ends else "is not allowed there"
            raise CompressError(
                f"grammar: token {tokens[good]} at position {self._length + good} {where}; "
                "commit only what `allowed` allows"
            )
        self._ended = self._ended or ends
        self._length += len(tokens)
        self._drafted.clear()

    def _follow(self, path: Sequence[int]) -> int:
        """Move the cursor along `path` as far as the grammar allows; how many tokens that is."""
        pairs = enumerate(zip(self._drafted, path, strict=False))
        shared = next((i for i, (had, wanted) in pairs if had != wanted), min(len(self._drafted), len(path)))
        if shared < len(self._drafted):
            self._engine.rollback(len(self._drafted) - shared)
        rest = list(takewhile(self._grammar.spells, path[shared:]))
        taken = self._engine.try_consume_tokens(rest) if rest else 0
        self._drafted[shared:] = rest[:taken]
        self._check()
        return shared + taken

    def _check(self) -> None:
        # An engine in error goes on answering: it forbids everything but the end of the text.
        if self._engine.is_error():
            raise GrammarError(f"grammar: llguidance gave up ({_reason(self._engine)}); simplify the grammar")


def _compile(
    field: str,
    value: object,
    grammar: str,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    stops: Collection[int],
) -> CompiledGrammar:
    """`grammar`, in Lark, made of `value` in the argument `field`."""
    tokens = prepare(tokenizer)
    eos = tokenizer.eos_token_id
    ends = frozenset(end for end in (*stops, *([] if eos is None else [eos])) if 0 <= end < vocab_size)
    if not ends:
        raise UsageError(f"stops: no id below vocab_size {vocab_size} ends a text; name the model's end-of-text ids")
    start = LLMatcher(tokens, grammar + _OPTIONS, log_level=0, limits=_LIMITS)
    if start.is_error():
        raise UsageError(f"{field}: {brief(value)} cannot be compiled ({_reason(start)}); change or simplify it")
    compiled = CompiledGrammar(start, tokens, ends, vocab_size)
    try:
        compiled.matcher().allowed(())  # some errors show only in use
    except GrammarError as error:
        raise UsageError(f"{field}: {brief(value)} cannot be used ({error})") from None
    return compiled


def prepare(tokenizer: PreTrainedTokenizerFast) -> LLTokenizer:
    """`tokenizer` for llguidance. Every function here calls it; one that runs beside others that use `tokenizer` calls
    it before, for it is all that reads more of it than its size. Raises UsageError for one that is not fast."""
    version, tokens = _tokenizers.get(tokenizer, (None, None))
    now = (len(tokenizer), tokenizer.eos_token_id)
    if tokens is None or version != now:
        try:
            tokens = from_tokenizer(tokenizer)
        except ValueError as error:
            raise UsageError(
                f"tokenizer: llguidance cannot use {type(tokenizer).__name__} ({error}); give a fast tokenizer"
            ) from None
        _tokenizers[tokenizer] = now, tokens
    return tokens


def _reason(engine: LLMatcher) -> str:
    """The engine's error as one line: without the source excerpts and, of our own wrapping, the position."""
    text = re.split(r"\n +\d+ \| |\n<non-verbose/>", engine.get_error())[0]
    text = re.sub(r"(regex parse error:).*\nerror:", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"^at 1\(8\): (failed to compile JSON schema: )?", "", text)
    return " ".join(text.split())[:300]
