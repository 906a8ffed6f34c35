"""What a checkpoint holds, from its headers and its config: no tensor data is read."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compressor.checkpoint.config import CONFIG, read_config
from compressor.checkpoint.reader import ShardReader
from compressor.errors import CompressError, brief
from compressor.formats.config import config_groups, find_target, target_names

# Native multi-token-prediction modules that carry "mtp" in their names, up to the root of one module:
# Qwen3-Next, Qwen3.5, Nemotron-H, DeepSeek-V4 (mtp.*); MiMo-7B (model.mtp_layers.i); MiMo-V2, LongCat
# (model.mtp.layers.i, model.mtp.norm); Ernie-4.5 (model.mtp_{emb_norm,hidden_norm,linear_proj,block}.0).
_MTP_NAMED = re.compile(r"(?:.+\.)?(?:mtp_layers\.\d+|mtp_[a-z_]+\.\d+|mtp\.layers\.\d+|mtp)(?=\.)")
# DeepSeek-V3, GLM-4.5 and later, Step-3.5: layers beyond num_hidden_layers. Language layers only: a vision tower has
# layers of its own, with a count of its own.
_LANGUAGE_LAYER = re.compile(r"((?:model\.|language_model\.model\.|model\.language_model\.)layers\.(\d+))\.(.+)")
_MTP_MARKS = ("eh_proj", "enorm", "hnorm", "e_proj", "h_proj")

_AUXILIARY = re.compile(
    r".*\.(weight_scale|weight_global_scale|weight_zero_point|weight_shape|weight_g_idx"
    r"|input_scale|input_zero_point|input_global_scale|weight_scale_2|weight_scale_inv|[kv]_scale)"
)
_PACKED = re.compile(r".*\.weight_packed")


class TensorInfo(NamedTuple):
    """One stored tensor; nbytes is its size in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Inventory:
    """The tensors of a checkpoint folder and what their names say.

    parameters: weights of the model, packed ones counted unpacked, scales and zero points not counted.
    total_bytes: of tensor data. mtp_modules: root names of native MTP modules, in order. tied: the output head reads
    the embedding table.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: dict[str, str]  # tensor name → file name
    parameters: int
    total_bytes: int
    mtp_modules: list[str]
    tied: bool

    @classmethod
    def read(cls, folder: Path | str) -> "Inventory":
        """Read config.json and the headers of every shard. Raises CompressError as `read_config` and `ShardReader`, and
        for a config and tensors that contradict each other (head missing, layers that the config does not count)."""
        folder = Path(folder)
        config = read_config(folder)
        with ShardReader(folder) as reader:
            names = reader.keys()
            tensors = {name: TensorInfo(reader.dtype(name), reader.shape(name), reader.nbytes(name)) for name in names}
            files = {name: reader.file_of(name) for name in names}
        return cls(
            config=config,
            tensors=tensors,
            files=files,
            parameters=_parameters(folder, config, tensors),
            total_bytes=sum(info.nbytes for info in tensors.values()),
            mtp_modules=_mtp_modules(folder, config, names),
            tied=_tied(folder, config, names),
        )

    def mtp_tensors(self) -> list[str]:
        """Names of all tensors inside the MTP modules, sorted."""
        roots = tuple(f"{root}." for root in self.mtp_modules)
        return [name for name in self.tensors if name.startswith(roots)]

    def mtp_linears(self) -> list[str]:
        """Names of the modules with a weight matrix inside the MTP modules, sorted."""
        weights = [name for name in self.mtp_tensors() if name.endswith(".weight")]
        return [name.removesuffix(".weight") for name in weights if len(self.tensors[name].shape) == 2]

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of tensor data by dtype name ("bfloat16"), largest first."""
        totals: dict[str, int] = {}
        for info in self.tensors.values():
            name = str(info.dtype).removeprefix("torch.")
            totals[name] = totals.get(name, 0) + info.nbytes
        return dict(sorted(totals.items(), key=lambda pair: (-pair[1], pair[0])))


def _text(config: dict[str, Any], key: str) -> Any:
    """A key of the language model: multimodal configs nest it in text_config."""
    nested = config.get("text_config")
    return nested[key] if isinstance(nested, dict) and key in nested else config.get(key)


def _parameters(folder: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> int:
    """Weights that the tensors stand for."""
    weights = [name for name in tensors if not _AUXILIARY.fullmatch(name)]
    packed = [name for name in weights if _PACKED.fullmatch(name)]
    bits = _packed_bits(folder / CONFIG, config, packed)
    return sum(
        tensors[name].nbytes * 8 // bits[name] if name in bits else math.prod(tensors[name].shape) for name in weights
    )


def _packed_bits(path: Path, config: dict[str, Any], packed: list[str]) -> dict[str, int]:
    """Bits of one weight in each of the packed tensors, as quantization_config states them: of the group that a layer
    belongs to, where they differ."""
    if not packed:
        return {}
    try:
        groups = config_groups(config.get("quantization_config") or {})
        stated = [group["weights"].get("num_bits") for group in groups.values()]
        if any(type(number) is not int or number < 1 for number in stated):
            stated = []
        if len(set(stated)) == 1:
            return dict.fromkeys(packed, stated[0])
        targets = target_names(groups) if stated else {}
        found = {name: find_target(name.rpartition(".")[0], targets) for name in packed}
    except CompressError as error:
        raise CompressError(f"{path}: {error}") from None
    for name, group in found.items():
        if group is None:
            bits = [group["weights"].get("num_bits") for group in groups.values()]
            raise CompressError(
                f"{path}: {name!r} is packed, but quantization_config states no num_bits for it ({brief(bits)})"
            )
    return {name: group["weights"]["num_bits"] for name, group in found.items() if group is not None}


def _mtp_modules(folder: Path, config: dict[str, Any], names: list[str]) -> list[str]:
    layers = _text(config, "num_hidden_layers")
    roots: dict[str, None] = {}
    beyond: dict[str, set[str]] = {}
    for name in names:
        if match := _MTP_NAMED.match(name):
            roots[match.group()] = None
        elif isinstance(layers, int) and (match := _LANGUAGE_LAYER.match(name)) and int(match[2]) >= layers:
            beyond.setdefault(match[1], set()).add(match[3].split(".")[0])
    for root, children in beyond.items():
        if not children.intersection(_MTP_MARKS):
            raise CompressError(
                f"{folder}: {root} is beyond num_hidden_layers {layers} of config.json and no MTP module; fix one"
            )
        roots[root] = None
    if any(root.endswith("mtp") for root in roots):
        # `mtp.layers.0` of a module that also has tensors of its own (mtp.fc, mtp.norm) is a part of it.
        whole = tuple(f"{root}." for root in roots if root.endswith("mtp"))
        roots = {root: None for root in roots if not root.startswith(whole)}
    return sorted(roots, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _tied(folder: Path, config: dict[str, Any], names: list[str]) -> bool:
    stated = _text(config, "tie_word_embeddings")
    has_head = any(name.endswith("lm_head.weight") for name in names)
    if stated is None:
        return not has_head
    is_causal = any(name.endswith("ForCausalLM") for name in config.get("architectures") or [])
    has_embedding = any(name.endswith("embed_tokens.weight") for name in names)
    if not stated and not has_head and is_causal and has_embedding:
        raise CompressError(f"{folder}: config.json says tie_word_embeddings false, but there is no lm_head.weight")
    return stated
