"""Where a head begins: its vocabulary, and the weights that it can take over from the target."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.train.corpus import Document
from compressor.train.eagle3 import Eagle3Head


def draft_vocabulary(documents: Sequence[Document], size: int, vocab_size: int) -> Tensor:
    """int64 [size], ascending: the ids that answers use most; among equally frequent ones the smaller ids."""
    counts = Counter(token for document in documents for token in document.tokens[document.start :])
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def coverage(documents: Sequence[Document], ids: Tensor) -> float:
    """Share of the answers' tokens that are among `ids`."""
    known = set(ids.tolist())
    tokens = [token for document in documents for token in document.tokens[document.start :]]
    return sum(token in known for token in tokens) / max(1, len(tokens))


@torch.no_grad()
def take_over(head: Eagle3Head, output: Tensor, norm: Tensor) -> None:
    """The target's output rows [draft_vocab, H] and final norm [H]."""
    head.lm_head.weight.copy_(output)
    head.norm.weight.copy_(norm)
