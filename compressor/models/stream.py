"""One decoder block in memory at a time: embed, run block by block, project to logits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from compressor.checkpoint.weights import Weights
from compressor.models import get, skeleton


class _LastLayerReached(Exception):
    """Ends the base model's forward once every block's arguments are known."""


class _Recorder(nn.Module):
    """Stands in for a decoder block: notes what the model would call it with and passes the hidden states on."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.arguments: dict = {}
        self.hidden: torch.Tensor | None = None
        self.stop = False
        if hasattr(layer, "attention_type"):  # some families choose the mask by it
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: torch.Tensor, **arguments) -> torch.Tensor:
        self.arguments, self.hidden = arguments, hidden_states
        if self.stop:
            raise _LastLayerReached
        return hidden_states


class BlockStream:
    """Runs a checkpoint whose weights are never all in memory.

    The transformers class does everything that depends on the architecture (masks, rotary tables, embedding scale,
    final norm, soft-capping): its blocks are replaced by recorders, and the real ones are filled one at a time.

    Args:
        weights: the checkpoint, packed or not.
        config: its transformers config.
        dtype: dtype of weights and hidden states.
    """

    def __init__(self, weights: Weights, config, dtype: torch.dtype):
        self.weights, self.config, self.dtype = weights, config, dtype
        self.family = get(config.model_type)
        self.model = skeleton.build(config, dtype)
        self.layers = list(self.model.model.layers)
        self.recorders = [_Recorder(layer) for layer in self.layers]
        self.model.model.layers = nn.ModuleList(self.recorders)

    def __len__(self) -> int:
        return len(self.layers)

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [rows, length] → hidden states [rows, length, hidden] that enter block 0.

        Also notes the arguments (mask, positions) of every block, valid for batches of any size of this length.
        """
        embedding = self.model.get_input_embeddings()
        if embedding.weight.is_meta:
            skeleton.fill(embedding, self.family.embedding + ".", self.weights.get, self.dtype)
        hidden = self._record(ids)
        self._record(ids[:1])  # masks and positions of one row fit any batch, those of several only their own
        return hidden

    def _record(self, ids: torch.Tensor) -> torch.Tensor:
        self.recorders[-1].stop = True
        try:
            self.model.model(input_ids=ids, use_cache=False)
        except _LastLayerReached:
            pass
        finally:
            self.recorders[-1].stop = False
        hidden = self.recorders[0].hidden
        assert hidden is not None
        for recorder in self.recorders:
            recorder.hidden = None
        return hidden

    def release_embedding(self) -> None:
        skeleton.release(self.model.get_input_embeddings())

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """Block `index` with its weights (and, for W4A4 and W8A8 linears, their input rounding); freed on exit."""
        layer, prefix = self.layers[index], self.family.block(index)
        skeleton.fill(layer, prefix, self.weights.get, self.dtype)
        hooks = []
        for name, scheme in self.weights.schemes.items():
            if name.startswith(prefix) and scheme.rounds_inputs:
                scale = self.weights.layer_tensors(name).get("input_global_scale")
                linear = layer.get_submodule(name.removeprefix(prefix))
                hooks.append(skeleton.emulate_activations(linear, scheme.fmt, scale))
        try:
            yield layer
        finally:
            for hook in hooks:
                hook.remove()
            skeleton.release(layer)
            self.weights.reader.close()  # unmap what has been read; the next block opens its shard again

    @torch.inference_mode()
    def run(self, index: int, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, length, hidden] through block `index`."""
        output = layer(hidden, **self.recorders[index].arguments)
        return output[0] if isinstance(output, tuple) else output

    @contextmanager
    def head(self) -> Iterator:
        """A function hidden [rows, length, hidden] → logits [rows, length, vocab], with final norm and head loaded. Of
        any length: the blocks' arguments are afterwards as they were."""
        norm, head = self.model.model.norm, self.model.lm_head
        arguments = [recorder.arguments for recorder in self.recorders]  # passes of the head record those of its own
        tied = bool(self.config.tie_word_embeddings)
        skeleton.fill(norm, self.family.final_norm + ".", self.weights.get, self.dtype)
        skeleton.fill(head, (self.family.embedding if tied else self.family.head) + ".", self.weights.get, self.dtype)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode(not hidden.requires_grad):
                return self.model(inputs_embeds=hidden, use_cache=False).logits

        try:
            yield logits
        finally:
            for recorder, noted in zip(self.recorders, arguments, strict=True):
                recorder.arguments = noted
            skeleton.release(norm)
            skeleton.release(head)
