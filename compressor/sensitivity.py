"""How much each token's input to each linear matters to the model's answer.

GPTQ's Hessian Σ x xᵀ weighs all tokens alike. To second order, the KL from the original model to one whose linear gives
y + δ is ½ δᵀ F δ with F = E[g gᵀ], g the gradient of the log-likelihood of a token drawn from the original's own law
(Fisher). Taking the mean of F's diagonal for F leaves one number a token, ‖g‖², and the Hessian Σ ‖g‖² x xᵀ
(GuidedQuant, Kim et al., arXiv 2505.07004, with one group of outputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from compressor.blocks import SelectedGroup
from compressor.checkpoint import writer
from compressor.checkpoint.digest import sha256_file
from compressor.decode.sampling import draw
from compressor.errors import CompressError
from compressor.job import check_file
from compressor.job_tensors import calibration_ids
from compressor.ui import UI

if TYPE_CHECKING:
    from compressor.pipeline import Run

STAGE = "sensitivity"
FILE = "sensitivity.safetensors"


def weigh(state: Run) -> None:
    """The stage of a job: token weights of every group that is quantized, where the recipe asks for them."""
    if not state.recipe.quantization.guided or state.job.stage(STAGE):
        return
    state.ui.stage(STAGE)
    groups = {
        state.family.block(index) + group.names[0]: [state.family.block(index) + name for name in group.names]
        for index, chosen in enumerate(state.block_groups)
        for group in chosen
    }
    ids = calibration_ids(state.job)
    found = token_weights(state.target, groups, ids, seed=state.recipe.run.seed, ui=state.ui)
    writer.save_atomic(state.job.path(FILE), found)
    state.job.finish(STAGE, {"sha256": sha256_file(state.job.path(FILE))})


def check(state: Run) -> None:
    """Raise CompressError where the weights are no longer what the stage recorded."""
    record = state.job.stage(STAGE)
    if record is not None:
        check_file(state.job.path(FILE), record["sha256"])


def weights(state: Run, index: int) -> dict[SelectedGroup, Tensor] | None:
    """float32 [rows, length] by group of block `index`; None where all tokens count the same."""
    if state.job.stage(STAGE) is None:
        return None
    prefix = state.family.block(index)
    with safe_open(state.job.path(FILE), "pt") as file:
        return {group: file.get_tensor(prefix + group.names[0]) for group in state.block_groups[index]}


def token_weights(
    model: nn.Module, groups: Mapping[str, Sequence[str]], ids: Tensor, *, seed: int, ui: UI
) -> dict[str, Tensor]:
    """For each group of linears that read the same input, ‖g‖² over the outputs of all of them, token by token.

    Args:
        model: the causal LM in full precision.
        groups: names of modules of `model`, by a name for the group.
        ids: int64 [rows, length].
        seed: of the tokens drawn.

    Returns float32 [rows, length] of mean 1 by group. Raises CompressError for logits that are not finite, and for
    gradients that are not or are all zero, naming the group.
    """
    weights = {name: torch.zeros(ids.shape) for name in groups}
    row = 0

    def hook(name: str):
        def add(module: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
            weights[name][row] += outputs[0].detach()[0].float().square().sum(-1)

        return add

    handles = [
        model.get_submodule(linear).register_full_backward_hook(hook(name))
        for name, linears in groups.items()
        for linear in linears
    ]
    generator = torch.Generator().manual_seed(seed)
    try:
        with ui.progress("sensitivity", len(ids)) as progress, torch.enable_grad():
            for row in range(len(ids)):  # which the hooks read
                _backward(model, ids[row : row + 1], generator)
                progress.advance()
    finally:
        for handle in handles:
            handle.remove()
    for name, found in weights.items():
        mean = found.mean()
        if not bool(mean.isfinite()) or not bool(mean > 0):
            raise CompressError(f"{name}: gradients of mean square {mean.item():g} say nothing of its tokens")
        found /= mean
    return weights


def _backward(model: nn.Module, ids: Tensor, generator: torch.Generator) -> None:
    """Gradients of the log-likelihood of one token drawn at every position of a row [1, length]."""
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)  # type: ignore[operator]
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    with torch.no_grad():
        if not bool(logits.isfinite().all()):
            raise CompressError("sensitivity: the original's logits are not finite; check its weights and dtype")
        law = torch.softmax(logits[0], -1, dtype=torch.float32)
        # one random number a row: torch.multinomial draws one for every entry, which took a fifth of this stage
        drawn = draw(law, torch.rand(len(law), generator=generator))[:, None]
        gradient = law.scatter_add_(1, drawn, torch.full(drawn.shape, -1.0)).to(logits.dtype)
    logits.backward(gradient[None])
