"""A checkpoint or a bundle as a runnable model: the transformers class, filled from the files, packed linears kept."""

import re
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from compressor.checkpoint.config import GENERATION_CONFIG, read_json_object
from compressor.checkpoint.inventory import Inventory
from compressor.checkpoint.weights import Weights
from compressor.decode.decoder import Decoder
from compressor.errors import CompressError, brief
from compressor.kernels.linear import PackedLinear, check_kernel
from compressor.models import skeleton

LEGACY_BUFFERS = r"rotary_emb\.inv_freq$"
"""Old checkpoints store this table, which the model class computes."""


@torch.no_grad()
def load(folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, kernel: str = "auto") -> PreTrainedModel:
    """The causal LM in `folder` (config.json and safetensors), ready to run on the CPU.

    Unquantized tensors are mapped from the files (copied only where `dtype` differs from the stored one); a
    compressed-tensors linear becomes a `PackedLinear`, whose `path`, `kernel` and `proof` say what runs it. `kernel`
    is "auto", "cpu-int4" or "dequantized" (see `PackedLinear`); the inputs of linears that the checkpoint says are W4A4
    or W8A8 are rounded as the engine would. generation_config.json, if there, sets `model.generation_config`.

    Raises CompressError naming the file or tensor for anything missing, unexpected, misshapen or not finite: a tensor
    that the model class does not use is an error too, unless it belongs to an MTP module or the class itself says that
    it ignores it. Raises UsageError for an unknown `kernel`.
    """
    check_kernel(kernel)
    folder = Path(folder)
    config, _ = skeleton.model_config(folder)
    weights = Weights(folder)
    model = skeleton.build(config, dtype)
    mtp = set(Inventory.read(folder).mtp_tensors())  # modules beside the model, for whoever proposes with them
    packed = {name: found for name, found in weights.packed.items() if f"{name}.{found[0]}" not in mtp}
    for layer in packed:
        model.set_submodule(layer, _packed_linear(model, layer, weights, dtype, kernel))
    used = _fill(model, weights, dtype) | mtp
    for layer, suffixes in packed.items():
        has_bias = model.get_submodule(layer).bias is not None
        used |= {f"{layer}.{suffix}" for suffix in (*suffixes, *(["bias"] if has_bias else []))}
    _refuse_unexpected(model, weights, used)
    if (folder / GENERATION_CONFIG).is_file():
        model.generation_config = _generation_config(folder)
    return model.eval().requires_grad_(False)


def decoder(folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, kernel: str = "auto") -> Decoder:
    """`load` and the runner's `Decoder` in one, the weights laid out for this machine. Arguments and errors as they."""
    return Decoder(load(folder, dtype=dtype, kernel=kernel), pack=True)


def _generation_config(folder: Path) -> GenerationConfig:
    path = folder / GENERATION_CONFIG
    ends = read_json_object(path).get("eos_token_id")
    tokens = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if any(type(token) is not int for token in tokens):
        raise CompressError(f"{path}: eos_token_id: {brief(ends)} is neither a token id nor a list of them; correct it")
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise CompressError(f"{path}: not a generation config ({reason})") from None


def _packed_linear(model: nn.Module, layer: str, weights: Weights, dtype: torch.dtype, kernel: str) -> PackedLinear:
    try:
        dense = model.get_submodule(layer)
    except AttributeError:
        dense = None
    if not isinstance(dense, nn.Linear):
        raise CompressError(f"{weights.folder}: '{layer}' is packed, but the model has no linear of that name")
    bias = weights.get(f"{layer}.bias") if dense.bias is not None else None
    scheme = weights.schemes[layer]
    try:
        packed = PackedLinear(
            scheme.fmt,
            weights.layer_tensors(layer),
            bias=bias,
            dtype=dtype,
            kernel=kernel,
            activations=scheme.rounds_inputs,
        )
    except CompressError as error:
        raise type(error)(f"{weights.folder}: {layer}: {error}") from None
    found, wanted = (packed.out_features, packed.in_features), (dense.out_features, dense.in_features)
    if found != wanted:
        raise CompressError(f"{weights.folder}: '{layer}' has shape {list(found)}, the config asks for {list(wanted)}")
    return packed


def _fill(model: PreTrainedModel, weights: Weights, dtype: torch.dtype) -> set[str]:
    """Load every dense tensor; returns the checkpoint names that were used."""
    tied: dict[str, str] = model.all_tied_weights_keys
    state: dict[str, torch.Tensor] = {}
    for name, empty in model.state_dict().items():
        if name in tied and name not in weights.reader:
            continue
        if name not in weights.reader:
            raise CompressError(f"{weights.folder}: tensor '{name}' is missing; the {model.config.model_type} needs it")
        tensor = weights.get(name)
        if tensor.shape != empty.shape:
            raise CompressError(
                f"{weights.folder}: tensor '{name}' has shape {list(tensor.shape)}, "
                f"the config asks for {list(empty.shape)}"
            )
        state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    for target, source in tied.items():
        if target in state and not torch.equal(state[target], state[source]):
            raise CompressError(
                f"{weights.folder}: '{target}' differs from '{source}' although config.json ties them; "
                "set tie_word_embeddings to false there if both are meant"
            )
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return set(state)


def _refuse_unexpected(model: PreTrainedModel, weights: Weights, used: set[str]) -> None:
    ignored = re.compile("|".join([LEGACY_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ())]))
    for name in sorted(set(weights.reader.keys()) - used):
        if not ignored.search(name):
            raise CompressError(
                f"{weights.folder / weights.reader.file_of(name)}: tensor '{name}' is not part of a "
                f"{model.config.model_type}; nothing would use it"
            )
