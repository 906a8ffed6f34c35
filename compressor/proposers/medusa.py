"""Medusa heads (Cai et al., 2024) in the checkpoint layouts that vLLM reads."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressor.checkpoint.config import CONFIG, read_json_object
from compressor.decode.decoder import Decoder
from compressor.decode.linear import Linear
from compressor.errors import CompressError, brief
from compressor.proposers.base import FINAL, Context, Draft
from compressor.proposers.drafting import check_branching, grow
from compressor.proposers.tensors import Tensors, logit_scale

DEFAULTS = {"num_heads": 5, "num_hidden_layers": 1}
"""vLLM's, for a config that does not say."""


class MedusaProposer:
    """Head i reads the target's final state at position p and predicts token p+2+i: the law of every level comes from
    one state, whatever is drafted above it.

    The newest state belongs to the token before the last committed one, so the first level is head 0's. Make one with
    `load`; its logits are -inf for ids outside a truncated vocabulary.
    """

    features: tuple[int, ...] = (FINAL,)

    def __init__(
        self,
        blocks: Sequence[Sequence[Linear]],
        heads: Sequence[Linear],
        ids: Tensor | None,
        vocab_size: int,
        scale: float,
        branching: tuple[int, ...] | None,
    ) -> None:
        self._blocks, self._heads, self._ids = blocks, heads, ids
        self._vocab_size, self._scale = vocab_size, scale
        self.branching = branching

    @property
    def levels(self) -> int:
        """How deep a draft can be: the number of heads."""
        return len(self._heads)

    @classmethod
    def load(cls, folder: str | Path, decoder: Decoder, branching: Sequence[int] | None = None) -> "MedusaProposer":
        """The heads in `folder` for the target `decoder`, in the target's dtype.

        config.json: `num_heads`, `num_hidden_layers` (blocks a head), `hidden_size`, `vocab_size`, and optionally
        `truncated_vocab_size`, `original_lm_head` (one output matrix for all heads), `medusa_fc_bias`, `logit_scale`.
        Tensors: ``blocks.{i}.layers.{j}.weight``, ``lm_heads.{i}.weight``, ``token_map`` for a truncated vocabulary; or
        the first Medusa release's ``{i}.{j}.linear.weight`` and ``{i}.{last}.weight``; with or without
        ``medusa_heads.``. (vLLM 0.32: models/medusa.py, transformers_utils/configs/medusa.py.)

        Raises CompressError, one line, for sizes that are not the target's, for tensors that are missing, misshapen,
        not finite or unknown, and for a `token_map` with ids outside the vocabulary; UsageError as `check_branching`.
        """
        folder, levels = Path(folder), check_branching(branching)
        config = _Config(folder, decoder)
        tensors = Tensors.of_folder(folder, decoder.dtype, decoder.device, _renamed)
        width = config.hidden_size
        blocks = [
            [
                Linear([tensors.linear(f"blocks.{head}.layers.{layer}", width, width, bias=config.bias)], pack=True)
                for layer in range(config.num_hidden_layers)
            ]
            for head in range(config.num_heads)
        ]
        ids = _token_map(config, tensors)
        heads = [
            _head(config, tensors, index, ids) for index in range(1 if config.original_lm_head else config.num_heads)
        ]
        if config.original_lm_head:
            heads *= config.num_heads
        unused = [r"^lm_heads\.\d+\.weight$"] if config.original_lm_head else []
        tensors.refuse_rest(*unused, *([] if config.truncated else ["^token_map$"]))
        return cls(blocks, heads, ids, decoder.vocab_size, config.scale, levels)

    def session(self) -> "MedusaSession":
        return MedusaSession(self)

    def logits(self, state: Tensor, index: int) -> Tensor:
        """State [H] → logits [V] of head `index`."""
        x = state[None]
        for linear in self._blocks[index]:
            x = x + F.silu(linear(x))
        logits = self._heads[index](x)[0] * self._scale
        if self._ids is None:
            return logits
        full = logits.new_full((self._vocab_size,), -torch.inf)
        full[self._ids] = logits
        return full


class MedusaSession:
    """One text; it has no state of its own."""

    def __init__(self, proposer: MedusaProposer) -> None:
        self._proposer = proposer

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        proposer = self._proposer
        if context.features is None:
            raise CompressError("the proposer got no state of the target for the new tokens")
        state = context.features[-1]

        def expand(draft: Draft, nodes: list[int]) -> Tensor:
            logits = proposer.logits(state, draft.depths[nodes[0]])
            return logits.expand(len(nodes), -1)

        limited = replace(context, k=min(context.k, proposer.levels))
        return grow(limited, proposer.branching, proposer.logits(state, 0), expand)


class _Config:
    """config.json, with the names that vLLM makes of older ones."""

    def __init__(self, folder: Path, decoder: Decoder) -> None:
        self.path = folder / CONFIG
        raw = read_json_object(self.path)
        for key in list(raw):
            if "num" in key and ("heads" in key or "layers" in key):
                raw["num_heads" if "heads" in key else "num_hidden_layers"] = raw.pop(key)
        self._raw = raw
        self.num_heads, self.num_hidden_layers = (self._size(key, default) for key, default in DEFAULTS.items())
        self.hidden_size = self._size("hidden_size", decoder.config.hidden_size)
        self.vocab_size = self._size("vocab_size", decoder.vocab_size)
        self.kept = self._size("truncated_vocab_size", self.vocab_size)
        self.original_lm_head = self._flag("original_lm_head")
        self.bias = self._flag("medusa_fc_bias")
        self.scale = logit_scale(self.path, raw)
        theirs = {"hidden_size": decoder.config.hidden_size, "vocab_size": decoder.vocab_size}
        for key, size in theirs.items():
            if getattr(self, key) != size:
                raise CompressError(f"{self.path}: {key}: {getattr(self, key)}; the target has {size}")
        if self.kept > self.vocab_size:
            raise CompressError(f"{self.path}: truncated_vocab_size: {self.kept} exceeds vocab_size {self.vocab_size}")

    @property
    def truncated(self) -> bool:
        return self.kept < self.vocab_size

    def _size(self, key: str, default: int) -> int:
        value = default if self._raw.get(key) is None else self._raw[key]
        if type(value) is not int or value < 1:
            raise CompressError(f"{self.path}: {key}: {brief(value)} is not a positive integer")
        return value

    def _flag(self, key: str) -> bool:
        value = self._raw.get(key, False)
        if not isinstance(value, bool):
            raise CompressError(f"{self.path}: {key}: {brief(value)} is neither true nor false")
        return value


def _renamed(name: str) -> str:
    """vLLM's name of a tensor of the first Medusa release."""
    name = name.replace("medusa_heads.", "")
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.\d+\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name


def _token_map(config: _Config, tensors: Tensors) -> Tensor | None:
    """int64 [truncated_vocab_size]: the ids that the heads know; None for all."""
    if not config.truncated:
        return None
    folder = config.path.parent
    ids = tensors.take("token_map", (config.kept,), ids=True)
    if ids.is_floating_point():
        raise CompressError(f"{folder}: tensor 'token_map' is {ids.dtype}; ids are integers")
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        outside = int(ids.max() if int(ids.min()) >= 0 else ids.min())
        raise CompressError(
            f"{folder}: tensor 'token_map' holds id {outside}, outside the {config.vocab_size} of config"
        )
    if len(ids.unique()) < len(ids):
        raise CompressError(f"{folder}: tensor 'token_map' holds an id twice")
    return ids.long()


def _head(config: _Config, tensors: Tensors, index: int, ids: Tensor | None) -> Linear:
    """The output matrix of a head, stored for the whole vocabulary or for the truncated one."""
    name = f"lm_heads.{index}.weight"
    if config.original_lm_head and "lm_head.weight" in tensors:
        name = "lm_head.weight"
    rows = config.kept
    if ids is not None and name in tensors and len(tensors.raw(name)) == config.vocab_size:
        rows = config.vocab_size
    weight = tensors.take(name, (rows, config.hidden_size))
    if ids is not None and rows != config.kept:
        weight = weight[ids]
    linear = nn.Linear(config.hidden_size, len(weight), bias=False, device="meta")
    linear.load_state_dict({"weight": weight}, assign=True)
    return Linear([linear.requires_grad_(False)], pack=True)
