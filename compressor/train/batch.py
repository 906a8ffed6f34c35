"""Documents side by side, as a batch of a proposer's training."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.train.corpus import Document


def padded(
    documents: Sequence[Document], states: Sequence[Tensor], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of B documents of at most L tokens: tokens int64 [B, L], the last `width` of their states [B, L, width]."""
    tokens = pad_sequence([torch.tensor(document.tokens) for document in documents], batch_first=True)
    final = pad_sequence([state[:, -width:] for state in states], batch_first=True)
    return tokens.to(device), final.to(device)


def answered(documents: Sequence[Document], first: int, tokens: Tensor) -> Tensor:
    """bool [B, L]: which of the padded `tokens` belong to an answer, `first` the first place that can."""
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    for row, document in zip(counted, documents, strict=True):
        row[max(document.start, first) : len(document.tokens)] = True
    return counted
