"""Trainable Medusa heads (Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads", arXiv 2401.10774), what one batch teaches them, and their checkpoint in the layout that vLLM loads.

Head i reads the target's state after the final norm at a position p and foresees token p+2+i: p+1 is the target's own.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressor.checkpoint import writer
from compressor.checkpoint.config import CONFIG
from compressor.checkpoint.reader import SINGLE_NAME
from compressor.errors import UsageError, naming
from compressor.train.batch import answered, padded
from compressor.train.corpus import Document
from compressor.train.loss import distill
from compressor.train.tally import Tally, cycles


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), `layers` times. W and b begin at zero, where a head says what the target itself says."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """Its state dict, with `token_map` beside it for a reduced vocabulary, is the checkpoint.

    Args:
        output: the target's output weight [V, H], where the heads' own begin.
        count: heads.
        layers: residual layers a head.
        shared: one output matrix for all heads, a fraction of the weights, instead of one each.
        target_ids: int64 [draft_vocab], the target's id of every id of the heads; None for all.

    Raises UsageError for a reduced vocabulary without `shared`: vLLM 0.32 gives separate outputs a row for every token.
    """

    target_ids: Tensor

    def __init__(
        self, output: Tensor, count: int, *, layers: int = 1, shared: bool = False, target_ids: Tensor | None = None
    ) -> None:
        super().__init__()
        if target_ids is not None and not shared:
            raise UsageError("medusa: a reduced vocabulary needs one output matrix; share it, or keep all tokens")
        self.count, self.layers, self.shared = count, layers, shared
        self.vocab_size, self.hidden_size = output.shape
        ids = torch.arange(self.vocab_size, device=output.device) if target_ids is None else target_ids
        self.register_buffer("target_ids", ids, persistent=False)
        self.blocks = nn.ModuleList(ResidualBlock(self.hidden_size, layers) for _ in range(count))
        self.lm_heads = nn.ModuleList(
            nn.Linear(self.hidden_size, len(ids), bias=False) for _ in range(1 if shared else count)
        )
        with torch.no_grad():
            for head in self.lm_heads:
                head.get_parameter("weight").copy_(output[ids])

    def forward(self, states: Tensor, index: int) -> Tensor:
        """States [N, H] of the target → those [N, H] that head `index` makes its logits of."""
        return self.blocks[index](states)

    def outputs(self) -> list[tuple[Tensor, list[int]]]:
        """Every output weight [draft_vocab, H], and the heads whose logits it makes."""
        heads = list(range(self.count))
        members = [heads] if self.shared else [[index] for index in heads]
        return [(head.get_parameter("weight"), group) for head, group in zip(self.lm_heads, members, strict=True)]


class MedusaTask(nn.Module):
    """Loss and acceptance of Medusa heads on the answers of documents.

    Args:
        heads: the module that is trained.
        teacher_head: the target's output weight [draft_vocab, H], rows of the heads' vocabulary.
        decay: weight of a head's loss relative to the head before.
    """

    teacher_head: Tensor
    draft_ids: Tensor

    def __init__(self, heads: MedusaHeads, teacher_head: Tensor, *, decay: float) -> None:
        super().__init__()
        self.heads, self.decay = heads, decay
        self.register_buffer("teacher_head", teacher_head, persistent=False)
        draft_ids = torch.full((heads.vocab_size,), -1, device=heads.target_ids.device)
        draft_ids[heads.target_ids] = torch.arange(len(heads.target_ids), device=draft_ids.device)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, documents: Sequence[Document], states: Sequence[Tensor]) -> tuple[Tensor, Tally]:
        """The mean loss a token of the answers, and the tally.

        states: per document [n, any · H], the last H after the final norm. A token outside the heads' vocabulary counts
        as missed and teaches nothing.
        """
        tokens, final = padded(documents, states, self.heads.hidden_size, self.teacher_head.device)
        counted = answered(documents, self.heads.count + 1, tokens)  # head i looks 2 + i back: all have a root
        row, place = counted.nonzero(as_tuple=True)
        labels = self.draft_ids[tokens[row, place]]
        scale = (labels >= 0).float() / max(1, len(labels))
        right = counted.new_zeros((self.heads.count, *counted.shape))
        total = scale.new_zeros(())
        for weight, members in self.heads.outputs():
            loss, hits = distill(
                torch.stack([self.heads(final[row, place - 2 - index], index) for index in members]),
                weight,
                final[row, place - 1],
                self.teacher_head,
                torch.stack([scale * self.decay**index for index in members]),
                labels,
            )
            total = total + loss
            for index, hit in zip(members, hits, strict=True):
                right[index, row, place] = hit
        return total, cycles(right, counted)


def export_medusa(heads: MedusaHeads, folder: Path) -> None:
    """Write config.json and model.safetensors into `folder`, weights in bfloat16. (vLLM 0.32: models/medusa.py,
    transformers_utils/configs/medusa.py.)"""
    kept = len(heads.target_ids)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": kept,
        "num_heads": heads.count,
        "num_hidden_layers": heads.layers,
        "medusa_fc_bias": True,
        "original_lm_head": heads.shared,
        "dtype": "bfloat16",
    }
    tensors = {name: value.detach().to("cpu", torch.bfloat16) for name, value in heads.named_parameters()}
    if kept < heads.vocab_size:
        tensors["token_map"] = heads.target_ids.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    writer.save_atomic(folder / SINGLE_NAME, tensors, {"format": "pt"})
    with naming(folder / CONFIG):
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
