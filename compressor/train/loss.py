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
        low = states.to(torch.bfloat16) if torch.is_autocast_enabled(states.device.type) else states
        head = weight.to(low.dtype)
        total = torch.zeros((), device=states.device)
        grad_states, grad_weight = (torch.zeros_like(low), torch.zeros_like(weight)) if learning else (None, None)
        right = torch.empty(states.shape[:2], dtype=torch.bool, device=states.device)
        for start in range(0, states.shape[1], ROWS):
            rows = slice(start, start + ROWS)
            wanted = (teacher[rows] @ teacher_weight.T).float().softmax(-1)
            for step in range(len(states)):
                logits = (low[step, rows] @ head.T).float()
                right[step, rows] = logits.max(-1).indices == labels[rows]
                log_probs = torch.log_softmax(logits, -1)
                part = scale[step, rows, None]
                total -= (part[:, 0] * (wanted * log_probs).sum(-1)).sum()
                if grad_states is not None and grad_weight is not None:
                    grad = log_probs.exp_().sub_(wanted).mul_(part).to(low.dtype)
                    grad_states[step, rows] = grad @ head
                    grad_weight += grad.T @ low[step, rows]
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
    return _Distill.apply(states, weight, teacher, teacher_weight, scale, labels, learning)  # type: ignore[no-any-return]
