"""What one batch teaches an EAGLE-3 head."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressor.train.batch import answered, padded
from compressor.train.corpus import Document
from compressor.train.eagle3 import Eagle3Head
from compressor.train.loss import distill
from compressor.train.tally import Tally, cycles


class Eagle3Task(nn.Module):
    """Loss and acceptance of a head on the answers of documents.

    Args:
        head: the module that is trained.
        teacher_head: the target's output weight [draft_vocab, H], rows of the head's vocabulary.
        steps: unrolled steps of the training-time test.
        decay: weight of a step's loss relative to the step before.
    """

    teacher_head: Tensor
    draft_ids: Tensor

    def __init__(self, head: Eagle3Head, teacher_head: Tensor, *, steps: int, decay: float) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("teacher_head", teacher_head, persistent=False)
        self.steps, self.decay = steps, decay
        draft_ids = torch.full((head.shape.vocab_size,), -1, dtype=torch.long)
        draft_ids[head.target_ids] = torch.arange(len(head.target_ids))
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, documents: Sequence[Document], states: Sequence[Tensor]) -> tuple[Tensor, Tally]:
        """The mean loss a token of the answers, and the tally.

        states: per document [n, (n_aux + 1) · H], the last H after the final norm. A token outside the head's
        vocabulary counts as missed and teaches nothing.
        """
        width, steps = self.head.shape.hidden_size, self.steps
        device = self.teacher_head.device
        tokens, padded_states = padded(documents, states, (len(self.head.shape.aux) + 1) * width, device)
        roots = tokens.shape[1] - 2  # the last ones foresee the last token
        found = self.head(padded_states[:, :roots, :-width], F.pad(tokens[:, 1:], (0, steps - 2)), steps)
        # A token of an answer is foreseen by step j from the root 2 + j before it.
        counted = answered(documents, steps + 1, tokens)
        row, place = counted.nonzero(as_tuple=True)
        labels = self.draft_ids[tokens[row, place]]
        scale = (labels >= 0).float() / max(1, len(labels))
        loss, hits = distill(
            torch.stack([state[row, place - 2 - step] for step, state in enumerate(found)]),
            self.head.lm_head.weight,
            padded_states[row, place - 1, -width:],
            self.teacher_head,
            torch.stack([scale * self.decay**step for step in range(steps)]),
            labels,
        )
        right = counted.new_zeros((steps, *counted.shape))
        right[:, row, place] = hits
        return loss, cycles(right, counted)
