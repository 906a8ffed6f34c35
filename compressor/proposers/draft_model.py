"""A separate, smaller model as the proposer."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compressor.decode.decoder import CHUNK, Decoder
from compressor.errors import UsageError
from compressor.proposers.base import FINAL, NOTHING, ROOT, Context, Draft
from compressor.proposers.drafting import check_branching, grow
from compressor.proposers.nodes import NodeCache, Rows


class DraftModelProposer:
    """Drafts with a model of its own, in a chain or, with `branching`, a tree.

    Args:
        decoder: the draft model.
        vocabulary: how many token ids it shares with the target (compressor.proposers.compatibility); it proposes no
            other.
        target_vocab_size: width of the target's logits, and of the laws it proposes from.
        branching: children of every node, one number a level; None drafts a chain.

    Nothing is proposed beyond the draft model's positions, nor after a token that it has no embedding for. Raises
    UsageError for a `vocabulary` that does not fit both models, and as `check_branching`.
    """

    features: tuple[int, ...] = ()

    def __init__(
        self, decoder: Decoder, vocabulary: int, target_vocab_size: int, branching: Sequence[int] | None = None
    ) -> None:
        if not 1 <= vocabulary <= min(decoder.vocab_size, target_vocab_size):
            raise UsageError(
                f"vocabulary: {vocabulary} shared ids; the draft model has {decoder.vocab_size} and the target "
                f"{target_vocab_size}, so it is a number from 1 to the smaller of the two"
            )
        self.decoder = decoder
        self.vocabulary = vocabulary
        self.target_vocab_size = target_vocab_size
        self.branching = check_branching(branching)

    def session(self) -> "DraftModelSession":
        return DraftModelSession(self)

    def read(self, tokens: Sequence[int], rows: Rows, count: int) -> Tensor:
        """Logits [count, target_vocab_size] after the last `count` of `tokens`."""
        decoder = self.decoder
        states = decoder.states(torch.tensor(tokens, device=decoder.device), rows.positions, [rows])
        logits = decoder.logits(states[FINAL][-count:])
        full = logits.new_full((count, self.target_vocab_size), -torch.inf)
        full[:, : self.vocabulary] = logits[:, : self.vocabulary]
        return full


class DraftModelSession:
    """One text, of which every token is read once: what was drafted and accepted stays in the cache."""

    def __init__(self, proposer: DraftModelProposer) -> None:
        self._proposer = proposer
        self._nodes = NodeCache(proposer.decoder.cache)
        self._draft = NOTHING
        self._lost = False  # the text has a token that the model cannot read

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        proposer, history, nodes = self._proposer, context.history, self._nodes
        nodes.keep(self._accepted(history))
        self._draft = NOTHING
        # The last level is never read, so its tokens need no positions.
        room = context.k if proposer.decoder.max_length is None else proposer.decoder.max_length + 1 - len(history)
        new = history[nodes.length :]
        self._lost = self._lost or max(new) >= proposer.decoder.vocab_size
        if room < 1 or self._lost:
            return NOTHING
        for start in range(0, len(new), CHUNK):
            part = new[start : start + CHUNK]
            rows = nodes.text(len(part))
            root = proposer.read(part, rows, 1)[0]
            nodes.add(rows)

        def expand(draft: Draft, level: list[int]) -> Tensor:
            rows = nodes.nodes(draft, level, len(history) - 1)
            logits = proposer.read([draft.tokens[node] for node in level], rows, len(level))
            nodes.add(rows)
            return logits

        self._draft = grow(replace(context, k=min(context.k, room)), proposer.branching, root, expand)
        return self._draft

    def _accepted(self, history: list[int]) -> list[int]:
        """The nodes of the last draft that were read and are now text. The text's last token is not among them: it is
        read again, for its logits."""
        path: list[int] = []
        for token in history[self._nodes.length : -1]:
            children = self._draft.children.get(path[-1] if path else ROOT, ())
            same = [node for node in children if self._draft.tokens[node] == token and node in self._nodes]
            if not same:
                break
            path += same
        return path
