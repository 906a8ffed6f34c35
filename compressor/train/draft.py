"""A small draft model made of the target: some of its layers, taught the target's distribution token by token."""

import copy
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from compressor.checkpoint import writer
from compressor.checkpoint.config import CONFIG
from compressor.checkpoint.reader import SINGLE_NAME
from compressor.checkpoint.source import tokenizer_files
from compressor.errors import CompressError, UsageError, naming
from compressor.train.batch import answered, padded
from compressor.train.corpus import Document
from compressor.train.loss import distill
from compressor.train.tally import Tally, cycles


def evenly(depth: int, layers: int) -> list[int]:
    """`layers` indices of `depth` layers, evenly spaced, the first and, of two or more, the last among them. Raises
    UsageError for a number that is not from 1 to `depth`."""
    if not 1 <= layers <= depth:
        raise UsageError(f"proposer.training.layers: {layers}: a draft model takes 1 to {depth} of the target's layers")
    return [round(i * (depth - 1) / max(1, layers - 1)) for i in range(layers)]


def draft_config(target: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The target's config for a model of `layers` of its layers, not quantized. Raises UsageError as `evenly`."""
    target = target.get_text_config()
    raw = target.to_dict()
    kept = evenly(target.num_hidden_layers, layers)
    raw.pop("quantization_config", None)
    raw["num_hidden_layers"] = layers
    if raw.get("layer_types"):
        raw["layer_types"] = [raw["layer_types"][index] for index in kept]
    return type(target).from_dict(raw)


def draft_of(target: Any, layers: int) -> Any:
    """A trainable transformers causal LM in float32 that begins with the target's embedding, output, final norm and
    evenly spaced layers.

    `target`: the loaded model, its weights plain. Raises CompressError for one whose linears are packed, UsageError as
    `evenly`.
    """
    model = AutoModelForCausalLM.from_config(draft_config(target.config, layers), dtype=torch.float32)
    kept = evenly(len(target.model.layers), layers)
    theirs = target.state_dict()
    ours = model.state_dict()
    origin = {
        name: re.sub(r"^model\.layers\.(\d+)\.", lambda m: f"model.layers.{kept[int(m[1])]}.", name) for name in ours
    }
    missing = [name for name in origin.values() if name not in theirs]
    if missing:
        raise CompressError(f"draft model: the target has no plain '{missing[0]}'; begin with the unquantized target")
    model.load_state_dict({name: theirs[source] for name, source in origin.items()})
    return model.eval()  # no dropout: it would make a resumed run another one


class DraftTask(nn.Module):
    """Loss and acceptance of a draft model on the answers of documents.

    Args:
        model: the transformers causal LM that is trained.
        teacher_head: the target's output weight [V, H_target].
        steps: depth of the drafted chain in the tally.
    """

    teacher_head: Tensor

    def __init__(self, model: Any, teacher_head: Tensor, *, steps: int) -> None:
        super().__init__()
        self.model, self.steps = model, steps
        self.register_buffer("teacher_head", teacher_head, persistent=False)

    def forward(self, documents: Sequence[Document], states: Sequence[Tensor]) -> tuple[Tensor, Tally]:
        """The mean loss a token of the answers, and the tally.

        states: per document [n, any · H_target], the last H_target after the final norm. The draft reads the text
        instead of its own chain: up to the chain's first mistake, behind which nothing counts, both are the same.
        """
        tokens, final = padded(documents, states, self.teacher_head.shape[1], self.teacher_head.device)
        counted = answered(documents, 1, tokens)
        row, place = counted.nonzero(as_tuple=True)
        # Padding lies behind the text, where causal attention does not look.
        found = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        labels = tokens[row, place]
        loss, hits = distill(
            found[None, row, place - 1],
            self.model.lm_head.weight,
            final[row, place - 1],
            self.teacher_head,
            torch.full((1, len(labels)), 1 / max(1, len(labels)), device=tokens.device),
            labels,
        )
        right = torch.zeros_like(counted)
        right[row, place] = hits[0]
        return loss, cycles(right.expand(self.steps, -1, -1), counted)


def export_draft(model: Any, tokenizer_source: Path, folder: Path) -> None:
    """Write a plain transformers checkpoint into `folder`, weights in bfloat16, with the tokenizer's files of the
    target's folder `tokenizer_source`. Raises CompressError where that has none."""
    files = tokenizer_files(tokenizer_source)
    if not files:
        raise CompressError(f"{tokenizer_source}: no tokenizer files; name the target's folder")
    folder.mkdir(parents=True, exist_ok=True)
    tied = model.all_tied_weights_keys
    tensors = {
        name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items() if name not in tied
    }
    writer.save_atomic(folder / SINGLE_NAME, tensors, {"format": "pt"})
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    with naming(folder / CONFIG):
        config.to_json_file(folder / CONFIG)
    for file in files:
        shutil.copyfile(file, folder / file.name)
