"""EAGLE-3 heads (Li et al., 2025), as vLLM and SGLang load them and as `speculators` writes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from compressor.checkpoint.config import CONFIG, TRANSFORMERS_ERRORS, check_fields, read_json_object
from compressor.decode.cache import SequenceCache
from compressor.decode.decoder import STATIC_ROPE, Decoder
from compressor.decode.layers import Attention, GatedMLP, Norm
from compressor.decode.linear import Linear
from compressor.errors import CompressError, brief
from compressor.formats import Format
from compressor.formats.config import head_format_from_config
from compressor.models import skeleton
from compressor.proposers.drafting import check_branching
from compressor.proposers.nodes import Rows
from compressor.proposers.recurrent import HeadSession, Module
from compressor.proposers.tensors import Tensors, logit_scale

MODEL_TYPES = ("llama", "qwen3")


@dataclass(frozen=True)
class Settings:
    """A head's config.json. `layer` is the transformers config of its block; `aux` the states of the target that it
    reads, None for the default; `fmt` the format of quantized linears, None where all are plain."""

    path: Path
    layer: PreTrainedConfig
    draft_vocab_size: int
    aux: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    logit_scale: float
    target_hidden_size: int
    fmt: Format | None


class Eagle3Proposer:
    """One block that reads three (or as many as the config says) states of the target and then its own.

    Its logits are -inf for ids outside its own vocabulary. Make one with `load`.
    """

    def __init__(self, settings: Settings, tensors: Tensors, decoder: Decoder, branching: tuple[int, ...] | None):
        config, hidden = settings.layer, settings.layer.hidden_size
        self.branching = branching
        self.features: tuple[int, ...] = _aux_layers(settings, decoder)
        self.vocab_size, self._scale = decoder.vocab_size, settings.logit_scale
        width = len(self.features) * settings.target_hidden_size
        self._input_norm = _norm(tensors, "input_norm", width, config) if settings.norm_before_fc else None
        self._fc_norms = [
            _norm(tensors, f"fc_norm.{index}", settings.target_hidden_size, config)
            for index in range(len(self.features) if settings.fc_norm else 0)
        ]
        self._fc = Linear([tensors.linear("fc", hidden, width)], pack=True)
        self.modules: Sequence[Module] = [Midlayer(settings, tensors, decoder)]
        self._ids = _target_ids(settings, tensors, decoder.vocab_size)
        self._head = _head(settings, tensors, decoder, reduced=self._ids is not None)

    @classmethod
    def load(cls, folder: str | Path, decoder: Decoder, branching: Sequence[int] | None = None) -> "Eagle3Proposer":
        """The head in `folder` for the target `decoder`, in the target's dtype.

        A head without `embed_tokens` or `lm_head` shares the target's. `branching`: children of every node, one number
        a level; None drafts a chain. Raises CompressError, one line, for a config that does not fit the target or is
        not supported, for tensors that are missing, misshapen, not finite or unknown, and for a `d2t` that does not map
        its vocabulary into the target's; UsageError as `check_branching`.
        """
        folder, levels = Path(folder), check_branching(branching)
        settings = read_settings(folder)
        tensors = Tensors.of_folder(folder, decoder.dtype, decoder.device, plain_name, settings.fmt)
        proposer = cls(settings, tensors, decoder, levels)
        tensors.refuse_rest(r"^mask_hidden$")  # of heads that can also draft in parallel
        return proposer

    def session(self) -> HeadSession:
        return HeadSession(self)

    def enter(self, features: Tensor) -> Tensor:
        """Aux states [N, n_aux · H_target] → [N, H]."""
        if self._input_norm is not None:
            features = self._input_norm(features)
        if self._fc_norms:
            parts = features.chunk(len(self._fc_norms), -1)
            features = torch.cat([norm(part) for norm, part in zip(self._fc_norms, parts, strict=True)], -1)
        return self._fc(features)

    def logits(self, states: Tensor) -> Tensor:
        """Final states [N, H] → [N, V] of the target."""
        logits = self._head(states) * self._scale
        if self._ids is None:
            return logits
        full = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        full[:, self._ids] = logits
        return full


class Midlayer:
    """The block: attention over [embedding, state] side by side, then a gated MLP, on the residual stream of states."""

    def __init__(self, settings: Settings, tensors: Tensors, decoder: Decoder) -> None:
        config = settings.layer
        hidden, dtype = config.hidden_size, decoder.dtype
        model = skeleton.build(config, dtype, settings.path)
        block, self._rotary = model.model.layers[0], model.model.rotary_emb.to(decoder.device)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(block.self_attn, name)
            wide = nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None, device="meta")
            setattr(block.self_attn, name, wide)
        tensors.fill_block(block, "midlayer.")
        self._attention = Attention(block.self_attn, config, pack=True)
        self._mlp = GatedMLP(block.mlp, pack=True)
        self._before_attention = Norm(block.input_layernorm)
        self._before_mlp = Norm(block.post_attention_layernorm)
        self._hidden_norm = _norm(tensors, "midlayer.hidden_norm", hidden, config)
        self._norm = _norm(tensors, "norm", hidden, config)
        self._settings, self._dtype, self._device = settings, dtype, decoder.device
        self._embedding = _embedding(settings, tensors, decoder)

    def __call__(self, hidden: Tensor, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(hidden[None], rows.positions[None])
        embedded = self._before_attention(F.embedding(tokens, self._embedding))
        normed = self._hidden_norm(hidden)
        x = normed if self._settings.norm_before_residual else hidden
        rope = (cos[0, :, None], sin[0, :, None])
        x = x + self._attention(torch.cat([embedded, normed], -1), rope, [rows], 0)
        x = x + self._mlp(self._before_mlp(x))
        final = self._norm(x)
        return final, final if self._settings.norm_output else x

    def cache(self, capacity: int) -> SequenceCache:
        attention = self._attention
        return SequenceCache(
            1, attention.kv_heads, attention.head_dim, capacity, dtype=self._dtype, device=self._device
        )


def plain_name(name: str) -> str:
    """The `speculators` format calls the block a first layer, as vLLM does."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def read_settings(folder: Path) -> Settings:
    """What the head's config.json says. Raises CompressError for one that is not supported."""
    path = folder / CONFIG
    raw = read_json_object(path)
    kind = raw.get("speculators_model_type")
    layer = raw if kind is None else raw.get("transformer_layer_config")
    if kind not in (None, "eagle3") or not isinstance(layer, dict):
        what = f"speculators_model_type: {brief(kind)}" if kind != "eagle3" else "no transformer_layer_config"
        raise CompressError(f"{path}: {what}; an EAGLE-3 head is needed")
    nested = {} if raw.get("eagle_config") is None else raw["eagle_config"]
    if not isinstance(nested, dict):
        raise CompressError(f"{path}: eagle_config: {brief(nested)} is not an object")

    def flag(key: str, default: bool) -> bool:
        value = nested.get(key, raw.get(key, default))
        if not isinstance(value, bool):
            raise CompressError(f"{path}: {key}: {brief(value)} is neither true nor false")
        return value

    def size(key: str, default: object) -> int:
        value = next((found for found in (raw.get(key), layer.get(key)) if found is not None), default)
        if type(value) is not int or value < 1:
            raise CompressError(f"{path}: {key}: {brief(value)} is not a positive integer")
        return value

    if not flag("use_aux_hidden_state", True):
        raise CompressError(f"{path}: use_aux_hidden_state: false is not supported; the head would read no aux states")
    config = _layer_config(path, layer)
    stated = (section.get("eagle_aux_hidden_state_layer_ids") for section in (raw, nested))
    ids = next((found for found in stated if found is not None), None)
    return Settings(
        path=path,
        layer=config,
        draft_vocab_size=size("draft_vocab_size", config.vocab_size),
        aux=None if ids is None else _ids(path, ids),
        # The raw format and speculators differ in this default (vLLM: llama_eagle3.py, configs/speculators/algos.py).
        norm_before_residual=flag("norm_before_residual", kind is not None),
        norm_before_fc=flag("norm_before_fc", False),
        fc_norm=flag("fc_norm", False),
        norm_output=flag("norm_output", False),
        logit_scale=logit_scale(path, raw),
        target_hidden_size=size("target_hidden_size", config.hidden_size),
        fmt=_format(path, raw),
    )


def _ids(path: Path, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(index) is not int for index in ids):
        raise CompressError(f"{path}: eagle_aux_hidden_state_layer_ids: {brief(ids)} is not a list of integers")
    return tuple(ids)


def _format(path: Path, raw: dict[str, Any]) -> Format | None:
    section = raw.get("quantization_config")
    if section is None:
        return None
    try:
        return head_format_from_config(section)
    except CompressError as error:
        raise CompressError(f"{path}: {error}") from None


def _layer_config(path: Path, layer: dict[str, Any]) -> PreTrainedConfig:
    """The transformers config of the head's one block."""
    model_type = layer.get("model_type", "llama")
    if model_type not in MODEL_TYPES:
        raise CompressError(f"{path}: model_type: {brief(model_type)} is no EAGLE-3 head; {' or '.join(MODEL_TYPES)}")
    if layer.get("num_hidden_layers") != 1:
        raise CompressError(f"{path}: num_hidden_layers: {brief(layer.get('num_hidden_layers'))}; a head has one layer")
    check_fields(layer, f"{path}: ")
    skip = ("model_type", "quantization_config", "return_dict", "eagle_config")
    try:
        config = AutoConfig.for_model(model_type, **{key: value for key, value in layer.items() if key not in skip})
    except TRANSFORMERS_ERRORS as error:
        raise CompressError(f"{path}: not a usable config ({' '.join(str(error).split())[:160]})") from None
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if not isinstance(rope, str) or rope not in STATIC_ROPE - {"longrope"}:
        raise CompressError(f"{path}: rope_type: {brief(rope)} changes with the length of the text; it is not run")
    return config


def default_aux(layers: int) -> tuple[int, ...]:
    """vLLM's choice for a head that does not say which states it reads."""
    return 2, layers // 2, layers - 3


def _aux_layers(settings: Settings, decoder: Decoder) -> tuple[int, ...]:
    """The states to read: k is the residual stream after k layers."""
    count = len(decoder.layers)
    ids = settings.aux if settings.aux is not None else default_aux(count)
    stated = "eagle_aux_hidden_state_layer_ids" + ("" if settings.aux is not None else " (vLLM's default)")
    if any(not 0 <= index <= count for index in ids):
        raise CompressError(f"{settings.path}: {stated}: {list(ids)}; the target has the states 0 to {count}")
    if not ids or list(ids) != sorted(set(ids)):
        raise CompressError(f"{settings.path}: {stated}: {list(ids)} does not ascend, as engines read the states")
    width = decoder.config.hidden_size
    if settings.target_hidden_size != width:
        raise CompressError(
            f"{settings.path}: target_hidden_size: {settings.target_hidden_size}; the target has {width}"
        )
    if settings.layer.vocab_size != decoder.vocab_size:
        raise CompressError(
            f"{settings.path}: vocab_size: {settings.layer.vocab_size}; the target has {decoder.vocab_size}"
        )
    return ids


def _norm(tensors: Tensors, name: str, size: int, config: PreTrainedConfig) -> Norm:
    module = nn.RMSNorm(size, config.rms_norm_eps, device="meta")
    tensors.fill(module, f"{name}.")
    return Norm(module)


def _embedding(settings: Settings, tensors: Tensors, decoder: Decoder) -> Tensor:
    """[V, H], the head's own or the target's."""
    shape = (decoder.vocab_size, settings.layer.hidden_size)
    if "embed_tokens.weight" in tensors:
        return tensors.take("embed_tokens.weight", shape)
    _must_be_as_wide(settings, decoder, "embed_tokens")
    return decoder.embedding.weight


def _head(settings: Settings, tensors: Tensors, decoder: Decoder, *, reduced: bool) -> Linear:
    """States → logits of the head's own vocabulary, or the target's."""
    if tensors.has_linear("lm_head") or reduced or settings.draft_vocab_size != decoder.vocab_size:
        own = tensors.linear("lm_head", settings.draft_vocab_size, settings.layer.hidden_size)
        return Linear([own], pack=True)
    _must_be_as_wide(settings, decoder, "lm_head")
    return decoder.head


def _must_be_as_wide(settings: Settings, decoder: Decoder, name: str) -> None:
    if settings.layer.hidden_size != decoder.config.hidden_size:
        raise CompressError(
            f"{settings.path.parent}: tensor '{name}.weight' is missing, and the target's does not fit: hidden_size is "
            f"{settings.layer.hidden_size} and the target's {decoder.config.hidden_size}"
        )


def _target_ids(settings: Settings, tensors: Tensors, vocabulary: int) -> Tensor | None:
    """int64 [draft_vocab]: the target's id of every id of the head; None where they are the same."""
    folder, size = settings.path.parent, settings.draft_vocab_size
    if "d2t" not in tensors:
        if size != vocabulary:
            raise CompressError(f"{folder}: tensor 'd2t' is missing: it maps {size} ids to the target's {vocabulary}")
        if "t2d" in tensors:
            tensors.raw("t2d")
        return None
    offsets = tensors.take("d2t", (size,), ids=True)
    if offsets.is_floating_point():
        raise CompressError(f"{folder}: tensor 'd2t' is {offsets.dtype}; offsets are integers")
    ids = torch.arange(size, device=offsets.device) + offsets.long()  # it stores target id - draft id
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise CompressError(
            f"{folder}: tensor 'd2t' maps id {first} to {int(ids[first])}, outside the target's {vocabulary} ids; it "
            "holds offsets, not ids"
        )
    if len(ids.unique()) < size:
        raise CompressError(f"{folder}: tensor 'd2t' maps two ids to one of the target's; it holds offsets, not ids")
    if "t2d" in tensors:
        known = tensors.take("t2d", (vocabulary,), ids=True).bool()
        if int(known.sum()) != size or not bool(known[ids].all()):
            raise CompressError(f"{folder}: tensor 't2d' marks other ids than 'd2t' maps to; one of them is stale")
    return ids
