"""Several texts generated side by side: one pass of the target a step, each text with its own law, seed and cache."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from compressor.decode import rejection
from compressor.decode.decoder import CHUNK, Decoder, Feed, Pass, refuse_unknown
from compressor.decode.law import Law, LawState
from compressor.decode.length import Fixed, Length
from compressor.errors import CompressError, UsageError
from compressor.proposers.base import MAX_NODES, NOTHING, Context, Draft, Proposer
from compressor.proposers.load import check_size

RULES = ("exact", "typical")


@dataclass
class Output:
    """What one text's generation produced. A cycle is one pass of the target that gives tokens; the first one reads the
    prompt.

    - `token_ids`: the new tokens only, cut after the first end-of-sequence token and at the length limit.
    - `proposals`: one tuple a cycle, the proposed token ids; empty where nothing was proposed (always the first cycle).
    - `parents`: one entry a cycle, the parent of every proposed node where the draft was a tree (compressor.proposers.
      base.Draft), None for a chain.
    - `accepted_per_position`: one tuple a cycle with a 1 or 0 for every proposed position (in a tree: level), in order:
      ones, then zeros from the first rejection on. So ``sum(entry)`` is the number accepted, the mean over entries that
      have position i is the unconditional rate engines report, and among entries with ones at all earlier positions it
      is the conditional rate. A tree proposes a level where any of its nodes lies there.
    - `stop`: "eos", "length", or "grammar" where the grammar's text is complete.

    Every cycle is verified in full, also the last: its counts include tokens that the length limit or an end of
    sequence then cuts from `token_ids`, as engines count, so that rates are not censored by where a text ends.
    """

    token_ids: list[int] = field(default_factory=list)
    proposals: list[tuple[int, ...]] = field(default_factory=list)
    parents: list[tuple[int, ...] | None] = field(default_factory=list)
    accepted_per_position: list[tuple[int, ...]] = field(default_factory=list)
    stop: str = "length"

    @property
    def cycles(self) -> int:
        return len(self.accepted_per_position)

    @property
    def proposed(self) -> int:
        return sum(len(entry) for entry in self.accepted_per_position)

    @property
    def accepted(self) -> int:
        return sum(sum(entry) for entry in self.accepted_per_position)

    def note(self, draft: Draft, accepted: int) -> None:
        self.proposals.append(draft.tokens)
        self.parents.append(draft.parents)
        self.accepted_per_position.append(tuple(int(i < accepted) for i in range(max(draft.depths, default=0))))


@dataclass(frozen=True)
class Request:
    """One text to continue. `stops` None takes the model's own end-of-sequence ids."""

    token_ids: Sequence[int]
    max_new_tokens: int
    law: Law
    seed: int = 0
    stops: frozenset[int] | None = None


class Text:
    """A request in progress. `fresh` are the tokens of the last step, none while a long prompt is read; `error` is why
    it ended early, if it did."""

    def __init__(self, request: Request, decoder: Decoder, proposer: Proposer | None) -> None:
        self.request = request
        self.history = [int(token) for token in request.token_ids]
        _check(request, self.history, decoder)
        stops = decoder.stops if request.stops is None else request.stops
        self.stops = stops
        self.law = LawState(request.law, decoder.vocab_size, stops)
        self.law.begin(self.history)
        self.generator = torch.Generator().manual_seed(request.seed)
        self.cache = decoder.cache(len(self.history) + request.max_new_tokens + MAX_NODES)
        self.session = proposer.session() if proposer is not None else None
        self.pending = self.history[:]  # committed tokens that the cache has not seen
        self.features: torch.Tensor | None = None
        self.output = Output()
        self.fresh: list[int] = []
        self.draft, self.draft_seconds = NOTHING, 0.0
        self.done = False
        self.error: Exception | None = None

    @property
    def reading(self) -> bool:
        """Whether the next pass reads prompt."""
        return not self.output.cycles

    @property
    def _in_pieces(self) -> bool:
        """Whether the next pass reads prompt and leaves some of it: no draft, and no logits that count."""
        return len(self.pending) > CHUNK

    def feed(self) -> Feed:
        if self._in_pieces:
            return Feed(self.pending[:CHUNK], self.cache)
        tokens = [*self.pending, *self.draft.tokens]
        return Feed(tokens, self.cache, self.draft.parents, len(self.draft.tokens) + 1)

    def propose(self, k: int, confidence: float, vocab_size: int) -> None:
        """Draft what may follow; nothing in the first cycle, which only reads the prompt, as in engines."""
        self.draft, start = NOTHING, time.perf_counter()
        if self.session is not None and k > 0 and not self.reading:
            context = Context(self.history, k, self.law, self.generator, self.features, confidence)
            self.draft = self.session.propose(context)
            self.features = None
            _check_draft(self.draft, k, vocab_size)
        self.draft_seconds = time.perf_counter() - start

    def advance(self, result: Pass, rule: str) -> int:
        """Verify the draft by the target's logits, commit what stands; returns how many levels were accepted."""
        draft = self.draft
        if self._in_pieces:
            self._keep(result, CHUNK, [])
            self.pending, self.fresh = self.pending[CHUNK:], []
            return 0
        path, token = self._verify(result.logits, rule)
        read, self.pending = len(self.pending), [] if token is None else [token]
        self._keep(result, read, [read + node for node in path])
        self.output.note(draft, len(path))
        self._emit([draft.tokens[node] for node in path] + self.pending)
        if token is None and not self.done:
            self.done, self.output.stop = True, "grammar"
        return len(path)

    def _keep(self, result: Pass, read: int, rows: list[int]) -> None:
        self.cache.keep(read, rows)
        if result.features is not None:
            kept = torch.cat([result.features[:read], result.features[rows]])
            self.features = kept if self.features is None else torch.cat([self.features, kept])

    def _verify(self, logits: torch.Tensor, rule: str) -> tuple[list[int], int | None]:
        law, draft = self.law, self.draft

        def law_at(node: int) -> torch.Tensor | None:
            path = draft.path(node)
            return None if law.closed(path) else law.probs(logits[node + 1], path)

        def best(node: int) -> int | None:
            path = draft.path(node)
            return None if law.closed(path) else law.best(logits[node + 1], path)

        if rule == "typical":
            return rejection.typical(draft, law_at, self.generator)
        if law.greedy:
            return rejection.follow(draft, best)
        return rejection.verify(draft, law_at, self.generator)

    def _emit(self, tokens: list[int]) -> None:
        self.fresh = []
        for token in tokens:
            self.fresh.append(token)
            if token in self.stops:
                self.done, self.output.stop = True, "eos"
            elif len(self.output.token_ids) + len(self.fresh) == self.request.max_new_tokens:
                self.done = True
            if self.done:
                break
        self.history += self.fresh
        self.output.token_ids += self.fresh
        if not self.done:
            self.law.commit(self.fresh)
            if self.law.closed(()):
                self.done, self.output.stop = True, "grammar"


class Batch:
    """Texts that share a target and a proposer; they join and leave between steps.

    Args:
        decoder: the target.
        proposer: drafts for every text, in a session of its own; None decodes with the target alone.
        length: how deep drafts are.
        rule: "exact", or "typical" for Medusa's typical acceptance, which is LOSSY.

    A text's law and random numbers are its own, so it has the same law alone and in any company. Raises UsageError for
    an unknown rule and for drafts longer than a cache has room for.
    """

    def __init__(
        self, decoder: Decoder, proposer: Proposer | None = None, length: Length | None = None, rule: str = "exact"
    ) -> None:
        check_rule(rule)
        self.decoder, self.proposer, self.rule = decoder, proposer, rule
        self.length = length if length is not None else Fixed(3)
        check_size(self.length.limit)
        self.texts: list[Text] = []

    def join(self, request: Request) -> Text:
        """Add a text; its prompt is read in the next step. Raises UsageError for an empty prompt, ids outside the
        vocabulary, or a length beyond the model's positions."""
        text = Text(request, self.decoder, self.proposer)
        self.texts.append(text)
        return text

    def leave(self, text: Text) -> None:
        """Drop a text, finished or not, and with it its caches."""
        if text in self.texts:
            self.texts.remove(text)

    @property
    def cache_bytes(self) -> int:
        """Bytes set aside for the target's keys and values."""
        return sum(text.cache.nbytes for text in self.texts)

    @torch.inference_mode()
    def step(self) -> list[Text]:
        """One cycle of every text; returns them, each with its `fresh` tokens. The finished ones have left. An error
        in one text's drafting or verification ends that text alone and is its `error`."""
        texts, k = list(self.texts), self.length.choose()
        for text in texts:
            self._guarded(text, self._draft, k)
        running = [text for text in texts if text.error is None]
        settled = not any(text.reading for text in running)  # reading a prompt says nothing about the cost of a cycle
        start = time.perf_counter()
        reads = tuple(self.proposer.features) if self.proposer is not None else ()
        results = self.decoder.forward([text.feed() for text in running], reads) if running else []
        seconds = time.perf_counter() - start
        cycles: list[tuple[int, int]] = []
        for text, result in zip(running, results, strict=True):
            self._guarded(text, self._advance, result, cycles)
        self.length.record(cycles, (sum(text.draft_seconds for text in running), seconds) if settled else None)
        for text in texts:
            if text.done or text.error is not None:
                self.leave(text)
        return texts

    def _draft(self, text: Text, k: int) -> None:
        positions = self.decoder.max_length
        if positions is not None:
            k = min(k, positions - len(text.history))  # the last proposal still needs a position of its own
        text.propose(k, self.length.confidence, self.decoder.vocab_size)

    def _advance(self, text: Text, result: Pass, cycles: list[tuple[int, int]]) -> None:
        drafted, reading = max(text.draft.depths, default=0), text.reading
        accepted = text.advance(result, self.rule)
        if not reading:
            cycles.append((drafted, accepted))

    def _guarded(self, text: Text, action, *args) -> None:
        try:
            action(text, *args)
        except Exception as error:  # kept for the caller; the texts beside it have nothing to do with it
            text.fresh, text.error = [], error


def check_rule(rule: str) -> None:
    """Raises UsageError for a name that is not among `RULES`."""
    if rule not in RULES:
        raise UsageError(f"rule: {rule!r} is not one of {', '.join(RULES)}")


def _check(request: Request, history: list[int], decoder: Decoder) -> None:
    if not history:
        raise UsageError("the prompt is empty: generation needs at least one token")
    if request.max_new_tokens < 1:
        raise UsageError(f"max_new_tokens: {request.max_new_tokens} is not a positive number")
    refuse_unknown(history, decoder.vocab_size)
    if decoder.max_length is not None and len(history) + request.max_new_tokens > decoder.max_length:
        raise UsageError(
            f"{len(history)} prompt tokens and {request.max_new_tokens} new ones exceed the model's "
            f"{decoder.max_length} positions; shorten the prompt or lower max_new_tokens"
        )


def _check_draft(draft: Draft, k: int, vocab_size: int) -> None:
    if len(draft.tokens) > MAX_NODES:
        raise CompressError(f"the proposer returned a tree of {len(draft.tokens)} nodes; at most {MAX_NODES} fit")
    rejection.check(draft, vocab_size)
    depth = max(draft.depths, default=0)
    if depth > k:
        raise CompressError(f"the proposer returned {depth} tokens in a row where at most {k} were asked for")
