"""How much of its law an EAGLE-3 head shares with the target, token by token on the target's own answers: what tells
states of the wrong layer, or a missing norm, from rounding, where the acceptance of a few greedy answers cannot.

Σ min(p, q) = 1 - total variation is the rate at which the target accepts what the head draws at temperature 1
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, theorem 3.5), here of
a draft's first token. It is computed, not drawn, so that two settings of a head can be compared in pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from compressor.decode.decoder import FINAL, Decoder
from compressor.decode.law import Law
from compressor.decode.reading import batches_of
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.proposers.nodes import NodeCache
from compressor.train import answers, states
from compressor.train.corpus import Document
from compressor.ui import UI

TOKENS = 64
READ_TOKENS = 1024
"""Tokens of texts whose states are held at a time."""
SHIFTS = (-1, 1)
"""Layers by which all states of a head are moved: what engines' conventions of numbering differ by."""
LEAST_TEXTS = 8
"""Of fewer texts the error of a difference is not known well enough to say which states are better."""
LEAST_ERRORS, LEAST_GAIN = 3.0, 0.005
"""By how many standard errors, and by how much, other states must be better before they are taken for the right ones.
For a head that has not learnt anything neighbouring states differ surely, but hardly."""
LEAST_DRAFTING = 0.1
"""Probability that the target gives the head's favourite tokens, below which nothing is said of the logits' scale."""
WIDEST = 1.6
"""How many times as sure of its favourite tokens as the target a head may be, or the target as the head. Training on
the target's law makes both alike: 1.1 in the head that this project ships, 0.46 without its final norm."""


@dataclass(frozen=True)
class Overlap:
    """Of every token that is foreseen, all [N]: `accepted`, Σ min(p, q); `sure`, the head's probability of its
    favourite token, and `granted`, the target's of the same one; `text`, the index of the text that it is in."""

    accepted: Tensor
    sure: Tensor
    granted: Tensor
    text: Tensor

    @cached_property
    def rate(self) -> float:
        """Expected acceptance of a draft's first token at temperature 1."""
        return float(self.accepted.mean())

    def difference(self, other: "Overlap") -> tuple[float, float]:
        """`rate` less that of `other` on the same texts, and the standard error, texts being the sample: infinite for
        one text."""
        texts = int(self.text.max()) + 1
        gains = self.accepted - other.accepted
        mean = float(gains.mean())
        of_texts = torch.zeros(texts).index_add(0, self.text, gains - mean)
        scale = texts / (texts - 1) if texts > 1 else torch.inf
        return mean, float((of_texts.square().sum().clamp(min=1e-12) * scale).sqrt()) / len(gains)


@dataclass(frozen=True)
class Examined:
    """A head's overlap with its own states, and by shift with those so many layers higher, where the target has them.
    `aux`: its own states."""

    aux: tuple[int, ...]
    own: Overlap
    moved: dict[int, Overlap]

    @property
    def fault(self) -> str | None:
        """Why the head's states or logits are not what it was trained with; None where nothing speaks for that."""
        sure, granted = float(self.own.sure.mean()), float(self.own.granted.mean())
        if granted >= LEAST_DRAFTING and not 1 / WIDEST <= sure / granted <= WIDEST:
            return (
                f"it gives its most probable token {sure:.1%} where the target gives it {granted:.1%}: a final norm or "
                "a scale of logits is missing"
            )
        if int(self.own.text.max()) + 1 < LEAST_TEXTS:
            return None
        found = {shift: overlap.difference(self.own) for shift, overlap in self.moved.items()}
        better = {
            shift: (gain, error)
            for shift, (gain, error) in found.items()
            if gain > LEAST_GAIN and gain > LEAST_ERRORS * error
        }
        if not better:
            return None
        shift, (gain, error) = max(better.items(), key=lambda item: item[1])
        return (
            f"with eagle_aux_hidden_state_layer_ids {[index + shift for index in self.aux]} the target would accept "
            f"{gain:.3f} ± {error:.3f} more of its drafts than with {list(self.aux)}"
        )

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        moved = {shift: overlap.difference(self.own) for shift, overlap in self.moved.items()}
        return {
            "tokens": len(self.own.accepted),
            "expected_acceptance": self.own.rate,
            "own_probability": float(self.own.sure.mean()),
            "target_probability": float(self.own.granted.mean()),
            **{f"layers{shift:+}": {"gain": gain, "error": error} for shift, (gain, error) in moved.items()},
        }


def greedy_texts(decoder: Decoder, prompts: Sequence[Sequence[int]], ui: UI) -> list[Document]:
    """Prompts with the target's answers, where they leave room for one and it has two tokens."""
    room = [prompt for prompt in prompts if decoder.max_length is None or len(prompt) + TOKENS <= decoder.max_length]
    with ui.progress("answers to examine the head on", len(room) * TOKENS) as bar:
        written = answers.Writing(
            decoder,
            room,
            max_new_tokens=TOKENS,
            law=Law(temperature=0.0),
            seed=0,
            stops=decoder.stops,
            advance=bar.advance,
        ).run()
    pairs = zip(room, written, strict=True)
    return [Document([*prompt, *answer], len(prompt)) for prompt, answer in pairs if len(answer) > 1]


@torch.inference_mode()
def examine(proposer: Eagle3Proposer, decoder: Decoder, texts: Sequence[Document]) -> Examined:
    """The overlap at all tokens of the answers but their first, which no draft foresees; one pass of the target.

    texts: at least one, each with an answer of two tokens or more.
    """
    own, count = proposer.features, len(decoder.layers)
    shifts = [0, *(shift for shift in SHIFTS if own[0] + shift >= 0 and own[-1] + shift <= count)]
    read = sorted({index + shift for index in own for shift in shifts})
    parts: dict[int, list[Overlap]] = {shift: [] for shift in shifts}
    for batch in batches_of([len(text.tokens) for text in texts], READ_TOKENS):
        found = states.read(decoder, [texts[i].tokens for i in batch], read)
        for i, rows in zip(batch, found, strict=True):
            by_layer = dict(zip([*read, FINAL], rows.split(decoder.config.hidden_size, -1), strict=True))
            target = decoder.logits(by_layer[FINAL][texts[i].start : -1]).softmax(-1, dtype=torch.float32)
            for shift in shifts:
                features = torch.cat([by_layer[index + shift] for index in own], -1)
                parts[shift].append(_of_text(_law(proposer, texts[i], features), target, i))
    joined = {shift: _joined(of) for shift, of in parts.items()}
    return Examined(own, joined.pop(0), joined)


def _law(proposer: Eagle3Proposer, text: Document, features: Tensor) -> Tensor:
    """What the head expects [answer's tokens - 1, V], given the target's states [n, n_aux · H] on the text. Row i reads
    the state at i and token i+1, and foresees token i+2."""
    module, tokens = proposer.modules[0], torch.tensor(text.tokens, device=features.device)
    rows = len(tokens) - 2
    top, _ = module(proposer.enter(features[:rows]), tokens[1:-1], NodeCache(module.cache).text(rows))
    return proposer.logits(top[text.start - 1 :]).softmax(-1, dtype=torch.float32)


def _of_text(head: Tensor, target: Tensor, index: int) -> Overlap:
    best = head.max(-1)
    granted = target.gather(-1, best.indices[:, None])[:, 0]
    accepted = torch.minimum(head, target).sum(-1)
    return Overlap(accepted.cpu(), best.values.cpu(), granted.cpu(), torch.full((len(head),), index))


def _joined(parts: Sequence[Overlap]) -> Overlap:
    columns = zip(*((part.accepted, part.sure, part.granted, part.text) for part in parts), strict=True)
    return Overlap(*(torch.cat(column) for column in columns))
