"""KL to the original's next-token law and its gradient, without keeping logits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TOKENS = 64
"""Positions whose logits are alive at a time: of a large vocabulary, few enough for memory to be used again."""
_TINY = 1e-30

Logits = Callable[[Tensor], Tensor]
"""Hidden states [1, tokens, hidden] that leave the last block → logits [1, tokens, vocab]."""


def kl(teacher: Logits, student: Logits, wanted: Tensor, hidden: Tensor) -> float:
    """Mean KL(teacher ‖ student) in nats; wanted, hidden [rows, length, H]: what leaves either's last block."""
    return kls(teacher, student, wanted, [hidden])[0]


def kls(teacher: Logits, student: Logits, wanted: Tensor, several: Sequence[Tensor]) -> list[float]:
    """`kl` of each of several hidden states."""
    totals = [0.0] * len(several)
    for target, *states in _parts(wanted, *several):
        log_p = teacher(target).float().log_softmax(-1)
        p = log_p.exp()
        for index, state in enumerate(states):
            log_q = student(state).float().log_softmax(-1)
            totals[index] += float((p * (log_p - log_q)).sum(dtype=torch.float64))
    return [total / wanted.shape[:2].numel() for total in totals]


def kl_gradient(teacher: Logits, student: Logits, wanted: Tensor, hidden: Tensor) -> tuple[float, Tensor]:
    """An estimate of `kl` from one part in eight, and the exact gradient, with respect to `hidden` and in its dtype, of
    the sum of KL over all positions: that of the mean would underflow in float16."""
    gradients, total, seen = [], 0.0, 0
    for index, (target, state) in enumerate(_parts(wanted, hidden)):
        leaf = state.detach().requires_grad_(True)
        logits = student(leaf)
        with torch.no_grad():
            p = torch.softmax(teacher(target), -1, dtype=torch.float32)
            q = torch.softmax(logits, -1, dtype=torch.float32)
            if index % 8 == 0:
                total += float((p * ((p + _TINY).log() - (q + _TINY).log())).sum(dtype=torch.float64))
                seen += state.shape[1]
            gradient = q.sub_(p).to(logits.dtype)
        logits.backward(gradient)
        gradients.append(leaf.grad)
    return total / seen, torch.cat(gradients, 1).view_as(hidden)


def _parts(*states: Tensor):
    return zip(*(x.reshape(1, -1, x.shape[-1]).split(TOKENS, 1) for x in states), strict=True)
