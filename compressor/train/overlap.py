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

from compressor.decode.decoder import FINAL, Decoder, refuse_unknown
from compressor.decode.law import Law
from compressor.decode.reading import batches_of
from compressor.errors import CompressError
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.proposers.nodes import NodeCache
from compressor.train import answers, states
from compressor.train.corpus import Document
from compressor.train.eagle3 import Eagle3Head
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
LEAST_RATE = 0.02
"""Expected acceptance below which a head is damaged, or another model's."""
LEAST_SAME = 0.9
"""What the laws of a trained head and of its export must share; their rounding differs."""


@dataclass(frozen=True)
class Overlap:
    """Of every token that is foreseen, all [N]: `accepted`, Σ min(p, q); `agrees`, whether head and target have one
    favourite; `text`, the index of the text that it is in."""

    accepted: Tensor
    agrees: Tensor
    text: Tensor

    @cached_property
    def rate(self) -> float:
        """Expected acceptance of a draft's first token at temperature 1."""
        return float(self.accepted.mean())

    def difference(self, other: "Overlap", of: str = "accepted") -> tuple[float, float]:
        """`rate`, or the mean of another field, less that of `other` on the same texts, and the standard error, texts
        being the sample: infinite for one text."""
        texts = int(self.text.max()) + 1
        gains = getattr(self, of) - getattr(other, of)
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

    @cached_property
    def gains(self) -> dict[int, tuple[float, float]]:
        """By shift, the gain in expected acceptance over the head's own states, and its standard error."""
        return {shift: overlap.difference(self.own) for shift, overlap in self.moved.items()}

    @property
    def fault(self) -> str | None:
        """Why the head is not what was trained for this target; None where nothing speaks for that."""
        if self.own.rate < LEAST_RATE:
            return f"at temperature 1 the target would accept {self.own.rate:.1%} of its first tokens: it is damaged"
        if int(self.own.text.max()) + 1 < LEAST_TEXTS:
            return None
        better = {
            shift: (gain, error)
            for shift, (gain, error) in self.gains.items()
            if gain > LEAST_GAIN and gain > LEAST_ERRORS * error
        }
        if not better:
            return None
        shift, (gain, error) = max(better.items(), key=lambda item: item[1])
        return (
            f"with eagle_aux_hidden_state_layer_ids {[index + shift for index in self.aux]} the target would accept "
            f"{gain:.3f} ± {error:.3f} more of its drafts than with {list(self.aux)}"
        )

    def __str__(self) -> str:
        moved = [
            f"{gain:+.3f} ± {error:.3f} with states one layer {'higher' if shift > 0 else 'lower'}"
            for shift, (gain, error) in self.gains.items()
        ]
        rate = f"at temperature 1 the target would accept {self.own.rate:.3f} of its first tokens"
        return ", ".join([rate, *moved])

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": len(self.own.accepted),
            "expected_acceptance": self.own.rate,
            "top1_agreement": float(self.own.agrees.mean()),
            **{
                f"layers{shift:+}": {"gain": gain, "error": error if error < torch.inf else None}
                for shift, (gain, error) in self.gains.items()
            },
        }


def fitting(prompts: Sequence[Sequence[int]], decoder: Decoder, tokens: int) -> list[Sequence[int]]:
    """The prompts that leave room for an answer of so many tokens."""
    return [prompt for prompt in prompts if decoder.max_length is None or len(prompt) + tokens <= decoder.max_length]


def greedy_texts(decoder: Decoder, prompts: Sequence[Sequence[int]], ui: UI) -> list[Document]:
    """Prompts with the target's answers, where they leave room for one and it has two tokens. Raises UsageError for ids
    that the target does not have."""
    for prompt in prompts:
        refuse_unknown(prompt, decoder.vocab_size)
    room = fitting(prompts, decoder, TOKENS)
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

    texts: at least one, each with an answer of two tokens or more. Raises CompressError for logits that are NaN.
    """
    own, count = proposer.features, len(decoder.layers)
    shifts = [0, *(shift for shift in SHIFTS if own[0] + shift >= 0 and own[-1] + shift <= count)]
    read = sorted({index + shift for index in own for shift in shifts})
    parts: dict[int, list[Overlap]] = {shift: [] for shift in shifts}
    for batch in batches_of([len(text.tokens) for text in texts], READ_TOKENS):
        found = states.read(decoder, [texts[i].tokens for i in batch], read)
        for i, rows in zip(batch, found, strict=True):
            by_layer = _by_layer(rows, read)
            target = decoder.logits(by_layer[FINAL][texts[i].start : -1]).softmax(-1, dtype=torch.float32)
            for shift in shifts:
                features = torch.cat([by_layer[index + shift] for index in own], -1)
                parts[shift].append(_of_text(_law(proposer, texts[i], features), target, i))
    joined = {shift: _joined(of) for shift, of in parts.items()}
    if not joined[0].accepted.isfinite().all():
        raise CompressError("the head's logits are NaN or infinite on the target's own states")
    return Examined(own, joined.pop(0), joined)


@torch.inference_mode()
def shared(head: Eagle3Head, proposer: Eagle3Proposer, decoder: Decoder, texts: Sequence[Document]) -> float:
    """What the law of the module that was trained has in common with that of its export, each given the states that it
    names: the mean of Σ min over the tokens of the answers."""
    both = sorted({*head.shape.aux, *proposer.features})
    parts = []
    for text in texts:
        (rows,) = states.read(decoder, [text.tokens], both)
        by_layer = _by_layer(rows, both)
        trained, exported = (
            torch.cat([by_layer[index] for index in aux], -1) for aux in (head.shape.aux, proposer.features)
        )
        tokens = torch.tensor([text.tokens[1:-1]], device=rows.device)
        (state,) = head(trained[None, : tokens.shape[1]].float(), tokens, 1)
        logits = head.lm_head(state[0, text.start - 1 :].float())
        law = torch.zeros(len(logits), decoder.vocab_size, device=rows.device)
        law[:, head.target_ids] = logits.softmax(-1)
        parts.append(torch.minimum(law, _law(proposer, text, exported)).sum(-1))
    return float(torch.cat(parts).mean())


def _by_layer(rows: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """The states [n, H] of `states.read`, by what was asked for."""
    return dict(zip([*layers, FINAL], rows.chunk(len(layers) + 1, -1), strict=True))


def _law(proposer: Eagle3Proposer, text: Document, features: Tensor) -> Tensor:
    """What the head expects [answer's tokens - 1, V], given the target's states [n, n_aux · H] on the text. Row i reads
    the state at i and token i+1, and foresees token i+2."""
    module, tokens = proposer.modules[0], torch.tensor(text.tokens, device=features.device)
    rows = len(tokens) - 2
    top, _ = module(proposer.enter(features[:rows]), tokens[1:-1], NodeCache(module.cache).text(rows))
    return proposer.logits(top[text.start - 1 :]).softmax(-1, dtype=torch.float32)


def _of_text(head: Tensor, target: Tensor, index: int) -> Overlap:
    agrees = head.argmax(-1) == target.argmax(-1)
    accepted = torch.minimum(head, target).sum(-1)
    return Overlap(accepted.cpu(), agrees.float().cpu(), torch.full((len(head),), index))


def _joined(parts: Sequence[Overlap]) -> Overlap:
    columns = zip(*((part.accepted, part.agrees, part.text) for part in parts), strict=True)
    return Overlap(*(torch.cat(column) for column in columns))
