"""The tensors of a proposer head, each checked where it is taken, so that nothing is left unset or unread."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.checkpoint.reader import ShardReader, check_finite
from compressor.decode.engine import LEGACY_BUFFERS
from compressor.errors import CompressError, brief
from compressor.formats import CODES, Format
from compressor.kernels import quantized

BESIDE_CODES = ("weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale")
"""Tensors that a quantized linear may have on disk beside its codes."""


def logit_scale(path: Path, config: dict[str, Any]) -> float:
    """The field of that name, 1 where it is missing. Raises CompressError for anything but a finite number."""
    value = config.get("logit_scale", 1.0)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # of an integer that no float holds
            if math.isfinite(value):
                return float(value)
    raise CompressError(f"{path}: logit_scale: {brief(value)} is not a finite number")


class Tensors:
    """Takes tensors by name out of `folder`, in `dtype` on `device`.

    Args:
        names: of all stored tensors; `get(name)` reads one and refuses what is not finite.
        rename: stored name → the name it is taken by. Raises CompressError for two tensors of one name.
        fmt: of the linears that are stored quantized; those have a `weight_scale`.
    """

    def __init__(
        self,
        folder: Path,
        names: Iterable[str],
        get: Callable[[str], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        rename: Callable[[str], str] = str,
        fmt: Format | None = None,
    ) -> None:
        self.folder, self._get, self._dtype, self._device, self._fmt = folder, get, dtype, device, fmt
        self._stored: dict[str, str] = {}
        for stored in names:
            name = rename(stored)
            if name in self._stored:
                raise CompressError(
                    f"{folder}: tensors '{self._stored[name]}' and '{stored}' are both '{name}'; remove one"
                )
            self._stored[name] = stored
        self._left = set(self._stored)

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        rename: Callable[[str], str] = str,
        fmt: Format | None = None,
    ) -> "Tensors":
        """All tensors of a checkpoint folder."""
        reader = ShardReader(folder)

        def get(name: str) -> Tensor:
            tensor = reader.get(name)
            check_finite(name, tensor, folder / reader.file_of(name))
            return tensor

        return cls(folder, reader.keys(), get, dtype, device, rename, fmt)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def has_linear(self, name: str) -> bool:
        """Whether the layer `name` is stored, plain or quantized."""
        return f"{name}.weight" in self or f"{name}.weight_scale" in self

    def raw(self, name: str) -> Tensor:
        """As it is stored. Raises CompressError for a tensor that is not there."""
        if name not in self._stored:
            raise CompressError(f"{self.folder}: tensor '{name}' is missing, and the proposer needs it")
        self._left.discard(name)
        return self._get(self._stored[name])

    def take(self, name: str, shape: Sequence[int], *, ids: bool = False) -> Tensor:
        """A weight in the proposer's dtype, or, of `ids`, a tensor as it is stored. Raises CompressError for one that
        is missing or of another shape, and for a weight that is not in floating point or does not fit the dtype."""
        tensor = self.raw(name)
        if not ids and not tensor.is_floating_point():
            raise CompressError(f"{self.folder}: tensor '{name}' is {tensor.dtype}; a weight is in floating point")
        if tuple(tensor.shape) != tuple(shape):
            raise CompressError(
                f"{self.folder}: tensor '{name}' has shape {list(tensor.shape)}, {list(shape)} is what fits the config"
            )
        found = tensor.to(self._device, None if ids else self._dtype)
        if not ids and not torch.isfinite(found).all():  # what is stored is finite: `get` has seen to it
            raise CompressError(f"{self.folder}: tensor '{name}' holds values that {self._dtype} cannot")
        return found

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Give every parameter and persistent buffer of `module` the tensor `prefix` + its name."""
        state = {name: self.take(prefix + name, empty.shape) for name, empty in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False)

    def fill_block(self, block: nn.Module, prefix: str) -> None:
        """`fill`, with each of its linears in place of the empty one: they may be stored quantized."""
        linears: dict[str, nn.Module] = {}
        for name, old in [*block.named_modules()]:
            if not isinstance(old, nn.Linear):
                continue
            parent, _, attribute = name.rpartition(".")
            new = self.linear(prefix + name, old.out_features, old.in_features, bias=old.bias is not None)
            setattr(block.get_submodule(parent), attribute, nn.Identity())
            linears[name] = new
        self.fill(block, prefix)
        for name, new in linears.items():
            parent, _, attribute = name.rpartition(".")
            setattr(block.get_submodule(parent), attribute, new)

    def linear(self, name: str, out_features: int, in_features: int, *, bias: bool = False) -> nn.Module:
        """The layer `name`. Raises CompressError as `take`, and for a quantized one that is not of the format."""
        if f"{name}.weight_scale" in self:
            return self._quantized(name, (out_features, in_features), bias=bias)
        linear = nn.Linear(in_features, out_features, bias=bias, device="meta")
        self.fill(linear, f"{name}.")
        return linear

    def _quantized(self, name: str, shape: tuple[int, int], *, bias: bool) -> nn.Module:
        if self._fmt is None:
            raise CompressError(
                f"{self.folder}: tensor '{name}.weight_scale' belongs to a quantized weight, and config.json has no "
                "quantization_config that says how to read it"
            )
        own = self.take(f"{name}.bias", shape[:1]) if bias else None
        codes = next((suffix for suffix in CODES if f"{name}.{suffix}" in self), CODES[0])
        suffixes = [suffix for suffix in (codes, *BESIDE_CODES) if f"{name}.{suffix}" in self]
        tensors = {suffix: self.raw(f"{name}.{suffix}") for suffix in suffixes}
        try:
            layer, found = quantized.linear(self._fmt, tensors, own, dtype=self._dtype, device=self._device)
        except CompressError as error:
            raise CompressError(f"{self.folder}: {name}: {error}") from None
        if found != shape:
            raise CompressError(
                f"{self.folder}: {name} is quantized in the shape {[*found]}, {[*shape]} is what fits the config"
            )
        return layer

    def refuse_rest(self, *ignored: str) -> None:
        """Raise CompressError for a tensor that nothing has taken, unless its name matches a pattern of `ignored`."""
        allowed = re.compile("|".join([LEGACY_BUFFERS, *ignored]))
        for name in sorted(self._left):
            if not allowed.search(name):
                raise CompressError(
                    f"{self.folder}: tensor '{self._stored[name]}' is not part of such a proposer; nothing would use it"
                )
