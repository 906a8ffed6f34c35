"""The proof, before anything is rounded, that a transformed checkpoint is the same function."""

from dataclasses import dataclass

import torch

from compressor.checkpoint.weights import Weights
from compressor.errors import CompressError
from compressor.models.stream import BlockStream
from compressor.transform.view import TransformedWeights

TOLERANCE = 1e-4
"""Largest absolute difference of a logit between the original and the transformed model."""
ROWS, LENGTH = 2, 32


@dataclass(frozen=True)
class Exactness:
    """max_logit_difference: over all positions and tokens. dtype: of the arithmetic in which it held. tokens: positions
    compared."""

    max_logit_difference: float
    dtype: str
    tokens: int


def token_rows(vocab_size: int, seed: int) -> torch.Tensor:
    """int64 [rows, length] drawn from the whole vocabulary."""
    return torch.randint(0, vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits(stream: BlockStream, ids: torch.Tensor) -> torch.Tensor:
    """Logits [rows, length, vocab] of token ids [rows, length], one block in memory at a time."""
    hidden = stream.embed(ids)
    stream.release_embedding()
    for index in range(len(stream)):
        with stream.block(index) as layer:
            hidden = stream.run(index, layer, hidden)
    with stream.head() as project:
        return project(hidden)


def check(view: TransformedWeights, config, ids: torch.Tensor) -> Exactness:
    """Compare the checkpoint that `view` transforms, whose config is `config`, with the view, on token ids
    [rows, length].

    Both run in float32 from weights that were not rounded to anything less. Where float32 alone cannot tell a mistake
    from its own rounding (a model with large activations), float64 decides. Raises CompressError naming the transforms
    where a logit differs by more than `TOLERANCE` in both.
    """
    for dtype in (torch.float32, torch.float64):
        exact = TransformedWeights(view.folder, view.family, config, view.transforms, dtype)
        original = logits(BlockStream(Weights(view.folder), config, dtype), ids)
        transformed = logits(BlockStream(exact, exact.config, dtype), ids)
        difference = float((original - transformed).abs().max())
        if difference <= TOLERANCE:
            return Exactness(difference, str(dtype).removeprefix("torch."), ids.numel())
    names = " + ".join(transform.name for transform in view.transforms)
    raise CompressError(
        f"{view.folder}: transform {names} changes the model: logits differ by {difference:.3g} before anything is "
        f"rounded, {TOLERANCE:g} is allowed; set transform.rotation and transform.smoothing to none"
    )
