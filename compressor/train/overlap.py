"""How much of its law an EAGLE-3 head shares with the target, at every token of fixed texts: what tells states of the
wrong layer, or a missing norm, from rounding, where the acceptance of a few greedy answers cannot.

Σ min(p, q) is the rate at which the target accepts what the head draws at temperature 1 (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", arXiv 2211.17192, theorem 3.5). It is computed, not drawn, so
that two settings of a head can be compared in pairs, token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.reading import batches_of
from compressor.errors import CompressError
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.proposers.nodes import NodeCache
from compressor.train import answers, states
from compressor.train.corpus import Document

TOKENS = 64
READ_TOKENS = 1024
"""Tokens of texts whose states are held at a time."""
SHIFTS = (-1, 1)
LEAST_ERRORS = 3.0
"""By how many standard errors states one layer off must be better before they are taken for the right ones."""
LEAST_OF_RIGHT = 0.7
"""Of the rate at which the head's most probable token is the target's, the share that the overlap must reach. Training
on the target's law makes them nearly alike (0.9); logits of another scale keep the first and lose the second."""


@dataclass(frozen=True)
class Overlap:
    """Of every foreseen token: `shared`, Σ min(p, q); `right`, whether the head's most probable token is the text's;
    `text`, the index of the text that it is in. All [N]."""

    shared: Tensor
    right: Tensor
    text: Tensor

    def beyond(self, other: "Overlap") -> tuple[float, float]:
        """Mean of `shared` less that of `other` on the same texts, and its standard error, texts being the sample."""
        texts = int(self.text.max()) + 1
        gains = self.shared - other.shared
        mean = float(gains.mean())
        of_texts = torch.zeros(texts).index_add(0, self.text, gains - mean)
        return mean, float((of_texts.square().sum() * texts / max(1, texts - 1)).sqrt()) / len(gains)


@dataclass(frozen=True)
class Examined:
    """A head's overlap with its own states, and by shift with those so many layers higher. `aux`: its own states."""

    aux: tuple[int, ...]
    own: Overlap
    moved: dict[int, Overlap]

    @property
    def fault(self) -> str | None:
        """Why the head's states or logits are not what it was trained with; None where nothing speaks for that."""
        shared, right = float(self.own.shared.mean()), float(self.own.right.mean())
        if shared < LEAST_OF_RIGHT * right:
            return (
                f"its law shares {shared:.3f} with the target's although its most probable token is right {right:.1%} "
                "of the time: a final norm or a scale of logits is missing"
            )
        best = max(self.moved, key=lambda shift: self.moved[shift].beyond(self.own)[0], default=None)
        if best is None:
            return None
        gain, error = self.moved[best].beyond(self.own)
        if gain <= LEAST_ERRORS * error:
            return None
        return (
            f"with eagle_aux_hidden_state_layer_ids {[index + best for index in self.aux]} its law shares {gain:.3f} "
            f"± {error:.3f} more with the target's: it was trained on those states"
        )

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        found = {"tokens": len(self.own.shared), "shared": float(self.own.shared.mean())}
        found["right"] = float(self.own.right.mean())
        moved = {shift: overlap.beyond(self.own) for shift, overlap in self.moved.items()}
        return found | {f"layers{shift:+}": {"gain": gain, "error": error} for shift, (gain, error) in moved.items()}


def greedy_texts(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[Document]:
    """Prompts with the target's answers of two tokens and more. Raises CompressError where there is none."""
    room = [prompt for prompt in prompts if decoder.max_length is None or len(prompt) + TOKENS <= decoder.max_length]
    law = Law(temperature=0.0)
    written = answers.Writing(decoder, room, max_new_tokens=TOKENS, law=law, seed=0, stops=decoder.stops).run()
    pairs = zip(room, written, strict=True)
    texts = [Document([*prompt, *answer], len(prompt)) for prompt, answer in pairs if len(answer) > 1]
    if not texts:
        raise CompressError(f"the head check has no answer of two tokens within {decoder.max_length} positions to read")
    return texts


@torch.inference_mode()
def examine(proposer: Eagle3Proposer, decoder: Decoder, texts: Sequence[Document]) -> Examined:
    """The overlap at all tokens of the answers but their first, which no draft foresees; one pass of the target."""
    own, count = proposer.features, len(decoder.layers)
    shifts = [0, *(shift for shift in SHIFTS if own[0] + shift >= 0 and own[-1] + shift <= count)]
    read = sorted({index + shift for index in own for shift in shifts})
    parts: dict[int, list[Overlap]] = {shift: [] for shift in shifts}
    for batch in batches_of([len(text.tokens) for text in texts], READ_TOKENS):
        found = states.read(decoder, [texts[i].tokens for i in batch], read)
        for i, rows in zip(batch, found, strict=True):
            by_layer = dict(zip(read, rows.split(decoder.config.hidden_size, -1), strict=False))
            final = rows[:, -decoder.config.hidden_size :]
            for shift in shifts:
                features = torch.cat([by_layer[index + shift] for index in own], -1)
                parts[shift].append(_of_text(proposer, decoder, texts[i], features, final, i))
    joined = {
        shift: Overlap(*(torch.cat([getattr(part, key) for part in of]) for key in ("shared", "right", "text")))
        for shift, of in parts.items()
    }
    return Examined(own, joined.pop(0), joined)


def _of_text(
    proposer: Eagle3Proposer, decoder: Decoder, text: Document, features: Tensor, final: Tensor, index: int
) -> Overlap:
    """`features` [n, n_aux · H] and `final` [n, H]: the target's states on the text. Row i of the head reads the state
    at i and token i+1, and foresees token i+2."""
    module, tokens = proposer.modules[0], torch.tensor(text.tokens, device=features.device)
    rows = len(tokens) - 2
    top, _ = module(proposer.enter(features[:rows]), tokens[1:-1], NodeCache(module.cache).text(rows))
    foreseen = proposer.logits(top[text.start - 1 :]).softmax(-1, dtype=torch.float32)
    wanted = decoder.logits(final[text.start : -1]).softmax(-1, dtype=torch.float32)
    right = foreseen.argmax(-1) == tokens[text.start + 1 :]
    shared = torch.minimum(foreseen, wanted).sum(-1)
    return Overlap(shared.cpu(), right.float().cpu(), torch.full((len(shared),), index))
