"""Generation with linear-chain speculation whose output law is exactly the target's."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compressor.decode.cache import KVCache
from compressor.decode.law import Law
from compressor.decode.rejection import accept_or_correct
from compressor.errors import CompressError, UsageError
from compressor.proposers.base import Proposal, Proposer

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types whose state is a list of keys and values, which `KVCache` can roll back. A recurrent state is not."""


@dataclass
class Output:
    """What one `generate` call produced. A cycle is one pass of the target; the first one reads the prompt.

    - `token_ids`: the new tokens only, cut after the first end-of-sequence token and at the length limit.
    - `proposals`: one tuple a cycle, the proposed token ids; empty where nothing was proposed (always the first cycle).
    - `accepted_per_position`: one tuple a cycle with a 1 or 0 for every proposed position, in order: ones, then
      zeros from the first rejection on. So ``sum(entry)`` is the number accepted, the mean over entries that have
      position i is the unconditional rate engines report, and among entries with ones at all earlier positions it is
      the conditional rate.
    - `stop`: "eos" or "length".

    Every cycle is verified in full, also the last: its counts include tokens that the length limit or an end of
    sequence then cuts from `token_ids`, as engines count, so that rates are not censored by where a text ends. Before
    the cut there are ``cycles + sum of all accepted`` tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    proposals: list[tuple[int, ...]] = field(default_factory=list)
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


class Runner:
    """Runs a causal language model, one sequence at a time, with an optional proposer.

    `model` is a transformers causal LM (or a module with its forward: `input_ids`, `cache`, `use_cache`,
    `logits_to_keep` → `.logits`). `proposer` None decodes with the target alone. Raises UsageError for a negative
    number of speculative tokens and CompressError for a model with layers whose state cannot be rolled back.
    """

    def __init__(self, model: nn.Module, proposer: Proposer | None = None, num_speculative_tokens: int = 3) -> None:
        if num_speculative_tokens < 0:
            raise UsageError(
                f"num_speculative_tokens: {num_speculative_tokens} is negative; 0 switches speculation off"
            )
        self.model = model
        self.proposer = proposer
        self.num_speculative_tokens = num_speculative_tokens
        config: Any = model.config
        self.vocab_size: int = config.vocab_size
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        stateful = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
        if stateful:
            raise CompressError(
                f"model_type '{config.model_type}': {', '.join(sorted(stateful))} layers cannot be rolled back; "
                "the runner reads full and sliding-window attention only"
            )

    @torch.inference_mode()
    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        law: Law,
        seed: int,
        eos_token_ids: Collection[int] | None = None,
    ) -> Output:
        """Continue `token_ids` by at most `max_new_tokens` tokens drawn from `law`.

        `eos_token_ids` None takes the model's own; an empty collection never stops early. The same arguments give the
        same output; with another proposer the law of the output is the same, not its tokens (greedy: the same tokens,
        as far as the model's logits do not depend on how many positions are computed at once).
        Raises UsageError for an empty prompt, ids outside the vocabulary, or a length beyond the model's positions.
        """
        history = [int(token) for token in token_ids]
        self._check(history, max_new_tokens)
        stops = self._model_stops() if eos_token_ids is None else frozenset(eos_token_ids)
        generator = torch.Generator().manual_seed(seed)
        cache = KVCache()
        out = Output()
        pending = history[:]  # committed tokens that the cache has not seen
        while True:
            # The first pass only reads the prompt: engines, too, start to propose from the first generated token.
            proposal = self._propose(history, law, generator) if out.cycles else Proposal(())
            p = law.probs(self._logits([*pending, *proposal.tokens], cache, len(proposal.tokens) + 1))
            count, token = accept_or_correct(p, proposal.q, proposal.tokens, generator)
            cache.rollback(len(history) + count)
            pending = [token]
            out.proposals.append(proposal.tokens)
            out.accepted_per_position.append(tuple(int(i < count) for i in range(len(proposal.tokens))))
            for emitted in (*proposal.tokens[:count], token):
                history.append(emitted)
                out.token_ids.append(emitted)
                if emitted in stops:
                    out.stop = "eos"
                    return out
                if len(out.token_ids) == max_new_tokens:
                    return out

    def _propose(self, history: list[int], law: Law, generator: torch.Generator) -> Proposal:
        k = self.num_speculative_tokens
        if self.max_length is not None:
            k = min(k, self.max_length - len(history))  # the last proposal still needs a position of its own
        if self.proposer is None or k <= 0:
            return Proposal(())
        proposal = self.proposer.propose(history, k, law, generator)
        if len(proposal.tokens) > k:
            raise CompressError(f"the proposer returned {len(proposal.tokens)} tokens where at most {k} were asked for")
        if any(not 0 <= token < self.vocab_size for token in proposal.tokens):
            raise CompressError(f"the proposer returned a token outside the target's vocabulary of {self.vocab_size}")
        return proposal

    def _logits(self, tokens: list[int], cache: KVCache, rows: int) -> torch.Tensor:
        """Logits [rows, V] at the last `rows` of `tokens`, which follow what `cache` holds; on the CPU."""
        device = next(self.model.parameters()).device
        inputs = torch.tensor([tokens], dtype=torch.long, device=device)
        return self.model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=rows).logits[0].cpu()

    def _check(self, history: list[int], max_new_tokens: int) -> None:
        if not history:
            raise UsageError("the prompt is empty: generation needs at least one token")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens: {max_new_tokens} is not a positive number")
        if any(not 0 <= token < self.vocab_size for token in history):
            raise UsageError(f"the prompt has a token id outside the model's vocabulary of {self.vocab_size}")
        if self.max_length is not None and len(history) + max_new_tokens > self.max_length:
            raise UsageError(
                f"{len(history)} prompt tokens and {max_new_tokens} new ones exceed the model's "
                f"{self.max_length} positions; shorten the prompt or lower max_new_tokens"
            )

    def _model_stops(self) -> frozenset[int]:
        for config in (getattr(self.model, "generation_config", None), self.model.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return frozenset([eos] if isinstance(eos, int) else eos)
        return frozenset()
