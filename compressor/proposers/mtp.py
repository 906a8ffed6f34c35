"""The multi-token prediction modules that a checkpoint brings along for itself."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from compressor.checkpoint.config import CONFIG
from compressor.checkpoint.inventory import Inventory
from compressor.checkpoint.weights import Weights
from compressor.decode.cache import SequenceCache
from compressor.decode.decoder import Decoder
from compressor.decode.layers import Layer, Norm
from compressor.decode.linear import Linear
from compressor.errors import CompressError, UsageError, brief
from compressor.models import skeleton
from compressor.proposers.base import FINAL
from compressor.proposers.drafting import check_branching
from compressor.proposers.nodes import Rows
from compressor.proposers.recurrent import HeadSession, Module
from compressor.proposers.tensors import Tensors

RECYCLE = ("post_norm", "pre_norm")


@dataclass(frozen=True)
class Layout:
    """How a family names and wires a module. Names are relative to its root.

    - `root`: pattern of the module's name.
    - `block`: of a module whose root holds several, numbered, blocks that share everything else.
    - `raw_state`: the first module reads the target's state before its final norm, not after it.
    - `hidden_first`: the projection reads [state, embedding], not [embedding, state].
    - `zero_first`: the embedding at position 0 is zero.
    - `offset_norms`: its norms multiply by 1 + w. Those inside the block are the family's own.
    - `copies`: tensors that are copies of the target's, which is what engines use.
    - `count`: the config's key for the number of modules.
    """

    root: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    block: str = ""
    raw_state: bool = False
    hidden_first: bool = False
    zero_first: bool = True
    offset_norms: bool = False
    copies: tuple[tuple[str, str], ...] = ()
    count: str = "num_nextn_predict_layers"


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYOUTS = {
    "MiMo": Layout(
        r"model\.mtp_layers\.\d+",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        raw_state=True,
        hidden_first=True,
    ),
    "DeepSeek": Layout(
        r"model\.layers\.\d+",
        "enorm",
        "hnorm",
        "eh_proj",
        "shared_head.norm",
        copies=(("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", HEAD)),
    ),
    "Qwen": Layout(
        r"mtp",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "fc",
        "norm",
        block="layers.{index}.",
        zero_first=False,
        offset_norms=True,
        count="mtp_num_hidden_layers",
    ),
}
"""As vLLM 0.32 runs them: models/{mimo,mimo_mtp,deepseek_mtp,qwen3_next_mtp}.py."""


class MtpProposer:
    """Module i predicts a token from the state that module i-1 handed on (module 0: the target's last state) and the
    embedding of the token after it; below the last module's level it goes on with its own states.

    Embedding and output head are the target's. Make one with `load`.
    """

    def __init__(
        self, modules: Sequence[Module], decoder: Decoder, branching: tuple[int, ...] | None, *, raw_state: bool
    ) -> None:
        self.features = (len(decoder.layers) if raw_state else FINAL,)
        self.modules, self.branching = modules, branching
        self._decoder = decoder

    @classmethod
    def load(
        cls,
        folder: str | Path,
        decoder: Decoder,
        branching: Sequence[int] | None = None,
        recycle: str = "post_norm",
    ) -> "MtpProposer":
        """The modules in the target's own `folder`, packed or not, in the target's dtype. Their blocks are decoder
        layers of the target's family.

        `recycle`: whether a module hands on its state after its final norm, as vLLM does, or before. `branching`:
        children of every node, one number a level; None drafts a chain.

        Raises CompressError, one line, for a checkpoint without modules, with modules of a layout that is not in
        `LAYOUTS` or not as many as the config says; for tensors that are missing, misshapen, not finite or unknown; and
        for a stored copy of embedding or head that differs from the target's. UsageError for an unknown `recycle` and
        as `check_branching`.
        """
        folder, levels = Path(folder), check_branching(branching)
        if recycle not in RECYCLE:
            raise UsageError(f"recycle: {brief(recycle)} is not one of {', '.join(RECYCLE)}")
        inventory = Inventory.read(folder)
        if not inventory.mtp_modules:
            raise CompressError(f"{folder}: no multi-token prediction modules in this checkpoint; use another proposer")
        weights = Weights(folder)
        names = _unpacked(inventory.mtp_tensors(), weights)
        tensors = Tensors(folder, names, weights.get, decoder.dtype, decoder.device)
        modules: list[Module] = []
        for root in inventory.mtp_modules:
            layout = _layout(folder, root)
            for copied, original in layout.copies:
                _refuse_other(weights, f"{root}.{copied}", original)
            shared = _Shared(layout, root, tensors, decoder)
            for prefix in _blocks(layout, root, names):
                modules.append(MtpModule(shared, prefix, tensors, decoder, handing_on_normed=recycle == "post_norm"))
        _check_count(folder, inventory.config, layout, len(modules))
        tensors.refuse_rest(*(re.escape(copied) for entry in LAYOUTS.values() for copied, _ in entry.copies))
        return cls(modules, decoder, levels, raw_state=layout.raw_state)

    def session(self) -> HeadSession:
        return HeadSession(self)

    def enter(self, features: Tensor) -> Tensor:
        return features

    def logits(self, states: Tensor) -> Tensor:
        """Final states [N, H] → [N, V]."""
        return self._decoder.logits(states)


class _Shared:
    """What comes before and after a module's block."""

    def __init__(self, layout: Layout, root: str, tensors: Tensors, decoder: Decoder) -> None:
        width, eps = decoder.config.hidden_size, decoder.config.rms_norm_eps

        def norm(name: str) -> Norm:
            module = Gemma3RMSNorm(width, eps) if layout.offset_norms else LlamaRMSNorm(width, eps)
            tensors.fill(module, f"{root}.{name}.")
            return Norm(module)

        self.layout = layout
        self.embedding_norm, self.hidden_norm = norm(layout.embedding_norm), norm(layout.hidden_norm)
        self.projection = Linear([tensors.linear(f"{root}.{layout.projection}", width, 2 * width)], pack=True)
        self.final_norm = norm(layout.final_norm)


class MtpModule:
    """One module: norms, projection, a block of the target's family, final norm."""

    def __init__(
        self, shared: _Shared, prefix: str, tensors: Tensors, decoder: Decoder, *, handing_on_normed: bool
    ) -> None:
        self._shared, self._decoder, self._handing_on_normed = shared, decoder, handing_on_normed
        full = "full_attention" in decoder.layer_types
        self._kind = "full_attention" if full else decoder.layer_types[-1]
        config = copy.deepcopy(decoder.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [self._kind]
        block = skeleton.build(config, decoder.dtype).model.layers[0]
        tensors.fill(block, prefix)
        self._block = Layer(block, config, pack=True)

    def __call__(self, hidden: Tensor, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        shared, layout = self._shared, self._shared.layout
        embedded = self._decoder.embed(tokens)
        if layout.zero_first:
            embedded = embedded.masked_fill((rows.positions == 0)[:, None], 0)
        parts = [shared.embedding_norm(embedded), shared.hidden_norm(hidden)]
        x = shared.projection(torch.cat(parts[::-1] if layout.hidden_first else parts, -1))
        x = self._block(x, self._decoder.rope(x, rows.positions)[self._kind], [rows], 0)
        final = shared.final_norm(x)
        return final, final if self._handing_on_normed else x

    def cache(self, capacity: int) -> SequenceCache:
        block, decoder = self._block, self._decoder
        return SequenceCache(1, block.kv_heads, block.head_dim, capacity, dtype=decoder.dtype, device=decoder.device)


def _layout(folder: Path, root: str) -> Layout:
    for layout in LAYOUTS.values():
        if re.fullmatch(layout.root, root):
            return layout
    raise CompressError(f"{folder}: module '{root}' is of no known layout; known: {', '.join(LAYOUTS)}")


def _blocks(layout: Layout, root: str, names: Sequence[str]) -> list[str]:
    """Name prefixes of the blocks of a module: one, or as many as its root holds."""
    if not layout.block:
        return [f"{root}."]
    pattern = re.compile(re.escape(root) + r"\.layers\.(\d+)\.")
    found = {int(match[1]) for name in names if (match := pattern.match(name))}
    return [f"{root}.{layout.block.format(index=index)}" for index in range(max(found, default=0) + 1)]


def _check_count(folder: Path, config: dict[str, Any], layout: Layout, found: int) -> None:
    """A module that a conversion has dropped would show as lower acceptance only."""
    stated = {**config, **(config.get("text_config") or {})}.get(layout.count)
    if stated is not None and stated != found:
        raise CompressError(f"{folder / CONFIG}: {layout.count}: {brief(stated)}; the checkpoint holds {found} modules")


def _unpacked(names: Sequence[str], weights: Weights) -> list[str]:
    """The names without quantization: a packed layer has one weight."""
    inside = {f"{layer}.{suffix}": f"{layer}.weight" for layer, parts in weights.packed.items() for suffix in parts}
    return sorted({inside.get(name, name) for name in names})


def _refuse_other(weights: Weights, copied: str, original: str) -> None:
    if copied not in weights.reader:
        return
    original = original if original in weights.reader else EMBEDDING  # a tied head
    one, other = weights.get(copied), weights.get(original)
    if one.dtype != other.dtype or not torch.equal(one, other):
        raise CompressError(
            f"{weights.folder}: tensor '{copied}' differs from '{original}', which is used in its place, as engines do"
        )
