"""The transformers class of a config, with parameters on the meta device and every buffer real."""

import ctypes
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from compressor.checkpoint.config import CONFIG, TRANSFORMERS_ERRORS, read_config
from compressor.errors import CompressError
from compressor.formats import Format


def model_config(folder: Path) -> tuple[PreTrainedConfig, dict | None]:
    """(transformers config, `quantization_config` or None) of a checkpoint folder.

    The quantization entry is taken out so that the dense class is built: packed layers are our own.
    Raises CompressError naming the file for a missing or unreadable config.json.
    """
    raw = read_config(folder)
    quantization = raw.pop("quantization_config", None)
    model_type = raw.pop("model_type")
    raw.pop("return_dict", None)  # without it a model answers with bare tuples
    try:
        config = AutoConfig.for_model(model_type, **raw)
    except TRANSFORMERS_ERRORS as error:
        path = Path(folder) / CONFIG
        raise CompressError(f"{path}: not a usable model config ({' '.join(str(error).split())[:160]})") from None
    return config, quantization


def build(config: PreTrainedConfig, dtype: torch.dtype, path: Path | str = CONFIG) -> PreTrainedModel:
    """The causal-LM class of `config` in `dtype`: parameters on meta, buffers (rotary tables and such) real. `path` is
    where the config came from, for errors."""
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except TRANSFORMERS_ERRORS as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise CompressError(f"{path}: no {config.model_type} can be built from it ({reason})") from None
    return model.eval().requires_grad_(False)


def fill(module: nn.Module, prefix: str, get, dtype: torch.dtype) -> None:
    """Give every parameter and persistent buffer of `module` its tensor `get(prefix + name)`, cast to `dtype`.

    Raises CompressError naming a tensor whose shape is not what the config says.
    """
    state = {}
    for name, empty in module.state_dict().items():
        tensor = get(prefix + name)
        if tensor.shape != empty.shape:
            raise CompressError(
                f"tensor '{prefix}{name}' has shape {list(tensor.shape)}, the config asks for {list(empty.shape)}"
            )
        state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False)


def release(module: nn.Module) -> None:
    """Put the parameters of `module` back on the meta device, freeing their memory."""
    module.load_state_dict({k: torch.empty_like(v, device="meta") for k, v in module.state_dict().items()}, assign=True)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc keeps freed pieces of this size for itself: 15 MB a block of a 135M model
        trim(0)


class _StraightThrough(torch.autograd.Function):
    """Rounded values forward, their gradients passed on as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def emulate_activations(linear: nn.Module, fmt: Format, input_global_scale: torch.Tensor | None) -> RemovableHandle:
    """Round the inputs of `linear` as a W4A4 or W8A8 engine would, until the returned handle is removed."""

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        with torch.no_grad():
            rounded = fmt.fake_quantize_activation(args[0], input_global_scale)
        return (_StraightThrough.apply(args[0], rounded),)

    return linear.register_forward_pre_hook(hook)
