"""Cross-entropy to a target's distribution over a large vocabulary, without keeping logits."""

from typing import Any

import torch
from torch import Tensor

ROWS = 1024
"""Rows worked on at a time: few enough for their logits not to fill the memory, many enough for one product to be
worth laying out the weight."""


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        teacher: Tensor,
        teacher_weight: Tensor,
        scale: Tensor,
        labels: Tensor,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        low, head = states.to(teacher.dtype), weight.to(teacher.dtype)
        total = torch.zeros((), device=states.device)
        grad_states, grad_weight = (torch.zeros_like(low), torch.zeros_like(weight)) if learning else (None, None)
        right = torch.empty(states.shape[:2], dtype=torch.bool, device=states.device)
        for start in range(0, states.shape[1], ROWS):
            rows = slice(start, start + ROWS)
            # Logits of a large vocabulary are what the time goes into: few passes over them, products beside them.
            wanted = torch.softmax(teacher[rows] @ teacher_weight.T, -1, dtype=torch.float32)
            for step in range(len(states)):
                logits = low[step, rows] @ head.T
                right[step, rows] = logits.max(-1).indices == labels[rows]
                log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
                part = scale[step, rows]
                total -= part @ torch.linalg.vecdot(wanted, log_probs)
                if grad_states is not None and grad_weight is not None:
                    grad = torch.sub(log_probs.exp_(), wanted, out=logits)
                    grad_states[step, rows] = (grad @ head) * part[:, None]
                    grad_weight += grad.T @ (low[step, rows] * part[:, None]).to(low.dtype)
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states.float() * grad, grad_weight * grad, None, None, None, None, None


def distill(
    states: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor, scale: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ scale · cross-entropy(softmax(teacher · teacher_weightᵀ), softmax(states · weightᵀ)), and bool [S, N]: whether
    the most probable token is the label.

    states [S, N, H], S predictions of the same N tokens, and weight [V, H] get gradients; teacher [N, H_t],
    teacher_weight [V, H_t], scale float32 [S, N] and labels int64 [N] do not. Softmax and sums in float32, products in
    the autocast dtype.
    """
    learning = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    fixed = teacher.to(dtype), teacher_weight.to(dtype), scale, labels
    with torch.autocast(device, enabled=False):  # it would round the sums too
        return _Distill.apply(states, weight, *fixed, learning)  # type: ignore[no-any-return]
