"""A checkpoint as it is after transforms, tensor by tensor."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compressor.checkpoint.weights import Weights
from compressor.errors import CompressError
from compressor.models import Family
from compressor.transform.base import Transform


class TransformedWeights(Weights):
    """`Weights` whose tensors are those of a checkpoint after `transforms`, in order; each is made when asked for.

    Args:
        folder: an unquantized checkpoint.
        family, config: of its model.
        transforms: applied one after the other.
        dtype: of the tensors that change; None: each keeps its stored one. They are rounded to it once, from float32
            (float64 for float64).

    `config` is that of the result: where a tied head no longer equals the embedding, it is untied, and the head is read
    by its own name. Raises CompressError for a quantized checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        family: Family,
        config,
        transforms: Sequence[Transform],
        dtype: torch.dtype | None = None,
    ):
        super().__init__(folder)
        if self.packed:
            raise CompressError(f"{folder}: quantized already; only full-precision weights can be transformed")
        self.family, self.transforms, self.dtype = family, tuple(transforms), dtype
        self._embedding, self._head = f"{family.embedding}.weight", f"{family.head}.weight"
        self.untied = bool(config.tie_word_embeddings) and any(transform.unties for transform in transforms)
        self.config = config
        if self.untied:
            self.config = copy.deepcopy(config)
            self.config.tie_word_embeddings = False

    def get(self, name: str) -> Tensor:
        """The tensor `name` after the transforms. Raises as `Weights.get`."""
        stored = super().get(self._embedding if self.untied and name == self._head else name)
        changes = [transform.changes[name] for transform in self.transforms if name in transform.changes]
        if not changes:
            return stored
        target = self.dtype or stored.dtype
        tensor = stored.to(torch.float64 if torch.float64 in (target, stored.dtype) else torch.float32)
        for change in changes:
            tensor = change(tensor)
        return tensor.to(target).contiguous()

    def added(self) -> list[str]:
        """Names of tensors that the checkpoint does not have."""
        return [self._head] if self.untied and self._head not in self.reader else []
