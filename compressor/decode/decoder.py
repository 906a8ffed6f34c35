"""A decoder-only model run on several texts at once, token by token, without padding.

All new tokens of a pass, of every text, form one list: projections and MLPs see [N, hidden], attention runs text by
text against that text's own cache. Texts of any lengths, prompts beside single tokens, chains and trees mix freely,
and nothing depends on what else is in the pass. The weights are those of a transformers model; its own forward is the
reference (tests/decode/test_decoder.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor import models
from compressor.decode.cache import SequenceCache
from compressor.decode.layers import Layer, Mixer, Norm, Span
from compressor.decode.linear import Linear
from compressor.errors import CompressError, UsageError, brief
from compressor.proposers.base import FINAL, ROOT

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types whose state is a list of keys and values, which can be rolled back. A recurrent state is not."""
STATIC_ROPE = {"default", "linear", "llama3", "yarn", "proportional", "longrope"}
"""Rotary embeddings whose table does not change with the length of the text. longrope's changes once: see
`Decoder.max_length`."""
CHUNK = 512
"""Tokens of a text that one pass reads at most: the mask of its attention has as many rows as tokens, and a column for
every position before them."""


@dataclass(frozen=True)
class Feed:
    """New tokens of one text.

    - `tokens`: committed tokens that the cache has not seen, then the nodes of a draft.
    - `parents`: one entry a node, the index of its parent among the nodes, `ROOT` for the last committed token; None
      where the nodes, if any, are a chain.
    - `rows`: of how many of the last tokens the logits are wanted.
    """

    tokens: Sequence[int]
    cache: SequenceCache
    parents: Sequence[int] | None = None
    rows: int = 1


@dataclass(frozen=True)
class Pass:
    """`logits` [rows, V] after the last `rows` tokens of a feed; `features` [len(tokens), width] or None."""

    logits: Tensor
    features: Tensor | None


class Decoder:
    """Runs a transformers causal LM of a supported shape.

    Args:
        model: the loaded model; its weights are used in place.
        pack: lay the bfloat16 weights out for this CPU (`Linear`) and take them away from `model`, which cannot be used
            afterwards. Faster, and no second copy.

    Raises CompressError for a model of an unknown family, and for one whose layers cannot be rolled back or whose
    rotary embedding depends on the length of the text.
    """

    def __init__(self, model: Any, *, pack: bool = False) -> None:
        config = model.config.get_text_config()
        _check(config)
        base = model.model
        self.config = config
        self.vocab_size: int = config.vocab_size
        self.max_length: int | None = _max_length(config)
        self.stops = _stops(model)
        self.embedding = base.embed_tokens
        self.rotary = base.rotary_emb
        types = getattr(config, "layer_types", None) or ["full_attention"] * len(base.layers)
        self.layer_types = types[: len(base.layers)]
        self.layers = [Layer(block, config, pack=pack) for block in base.layers]
        self.norm = Norm(base.norm)
        # A tied head is the embedding, which lookups need as it is: packing would make a second copy.
        tied = model.lm_head.weight is base.embed_tokens.weight
        self.head = Linear([model.lm_head], pack=pack and not tied)
        self.dtype: torch.dtype = base.embed_tokens.weight.dtype
        self.device: torch.device = base.embed_tokens.weight.device
        self._per_type_rope = isinstance(config.rope_parameters, dict) and set(config.rope_parameters) >= set(types)

    def cache(self, capacity: int) -> SequenceCache:
        """An empty cache for a text of at most `capacity` tokens. Raises UsageError where memory has no room for it."""
        first = self.layers[0]
        try:
            return SequenceCache(
                len(self.layers), first.kv_heads, first.head_dim, capacity, dtype=self.dtype, device=self.device
            )
        except RuntimeError:  # how torch says that an allocation failed
            size = 2 * len(self.layers) * first.kv_heads * first.head_dim * capacity * self.dtype.itemsize
            raise UsageError(
                f"a cache of {capacity} tokens takes {size / 2**30:.3g} GiB, more than there is; lower max_new_tokens"
            ) from None

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], features: Sequence[int] = ()) -> list[Pass]:
        """One pass over the new tokens of every feed. Keys and values are written behind each cache's valid part;
        committing them (`SequenceCache.keep`) is the caller's decision.

        `features`: states to return, side by side: k for the residual stream after k layers, `FINAL` for the state
        after the final norm.
        """
        spans, positions = spans_of(feeds, self.device)
        tokens = torch.tensor([token for feed in feeds for token in feed.tokens], device=self.device)
        states = self.states(tokens, positions, spans, features)
        x = states[FINAL]
        wanted = torch.cat([x[span.end - feed.rows : span.end] for feed, span in zip(feeds, spans, strict=True)])
        logits = self.logits(wanted).split([feed.rows for feed in feeds])
        beside = torch.cat([states[k] for k in features], -1) if features else None
        return [
            Pass(row, None if beside is None else beside[span.start : span.end])
            for row, span in zip(logits, spans, strict=True)
        ]

    def states(
        self, tokens: Tensor, positions: Tensor, spans: list[Span] | Mixer, features: Sequence[int] = ()
    ) -> dict[int, Tensor]:
        """The states [N, hidden] of `tokens` int64 [N] that `features` names, and `FINAL` in any case. Keys and values
        are written behind the valid part of every span's cache."""
        x = self.embed(tokens)
        rope = self.rope(x, positions)
        states = {0: x}
        for index, (layer, kind) in enumerate(zip(self.layers, self.layer_types, strict=True)):
            x = layer(x, rope[kind], spans, index)
            if index + 1 in features:
                states[index + 1] = x
        return states | {FINAL: self.norm(x)}

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [N] → [N, hidden]."""
        return self.embedding(tokens)

    def rope(self, x: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin [N, 1, rotary_dim] of every layer type at `positions` [N]."""
        tables = {}
        for kind in set(self.layer_types):
            extra = (kind,) if self._per_type_rope else ()
            cos, sin = self.rotary(x[None], positions[None], *extra)
            tables[kind] = (cos[0, :, None], sin[0, :, None])
        return tables

    def logits(self, x: Tensor) -> Tensor:
        """Final states [N, hidden] → [N, V]."""
        logits = self.head(x)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def spans_of(feeds: Sequence[Feed], device: torch.device | str) -> tuple[list[Span], Tensor]:
    """Where each feed's tokens lie in the pass and what they may attend to, and the positions [N] of all of them."""
    spans: list[Span] = []
    positions: list[int] = []
    start = 0
    for feed in feeds:
        count, length = len(feed.tokens), feed.cache.length
        ancestors = None
        if feed.parents is None:
            positions += range(length, length + count)
        else:
            committed = count - len(feed.parents)
            depths, ancestors = _tree(feed.parents, committed)
            positions += [*range(length, length + committed), *(length + committed - 1 + depth for depth in depths)]
        spans.append(Span(start, count, feed.cache, ancestors))
        start += count
    return spans, torch.tensor(positions, device=device)


def _tree(parents: Sequence[int], committed: int) -> tuple[list[int], Tensor]:
    """Depth of every node, and bool [n, n] among all new tokens: whether the row may attend to the column."""
    count = committed + len(parents)
    sees = torch.ones(count, count, dtype=torch.bool).tril()
    sees[committed:, committed:] = False
    depths: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(1 if parent == ROOT else depths[parent] + 1)
        if parent != ROOT:
            sees[committed + node] = sees[committed + parent]
        sees[committed + node, committed + node] = True
    return depths, sees


def _check(config) -> None:
    models.get(config.model_type)  # another family's block may look the same and compute something else
    if getattr(config, "use_bidirectional_attention", False):
        raise CompressError(
            f"model_type '{config.model_type}': use_bidirectional_attention: what sees later tokens cannot be cached"
        )
    stateful = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if stateful:
        raise CompressError(
            f"model_type '{config.model_type}': {', '.join(sorted(stateful))} layers cannot be rolled back; "
            "the runner reads full and sliding-window attention only"
        )
    for kind in _rope_types(config):
        if not isinstance(kind, str) or kind not in STATIC_ROPE:
            raise CompressError(
                f"model_type '{config.model_type}': rope_type {brief(kind)} changes with the length of the text, so a "
                "cache cannot be rolled back exactly; the runner does not run it"
            )


def _rope_types(config) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict) and "rope_type" in entry]
    return [entry.get("rope_type", "default") for entry in nested or [parameters]]


def refuse_unknown(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UsageError for token ids that the model does not have."""
    if any(not 0 <= token < vocab_size for token in tokens):
        raise UsageError(f"the prompt has a token id outside the model's vocabulary of {vocab_size}")


def _max_length(config) -> int | None:
    """Positions the model has. longrope changes its table beyond the original context, where the keys cached so far
    would no longer fit: texts end there."""
    positions = getattr(config, "max_position_embeddings", None)
    if "longrope" in _rope_types(config):
        return getattr(config, "original_max_position_embeddings", None) or positions
    return positions


def _stops(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()
