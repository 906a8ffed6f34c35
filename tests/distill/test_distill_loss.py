"""The loss of distillation: KL to the original's law, and its gradient."""

import torch

from compressor.distill.loss import TOKENS, kl, kl_gradient

VOCABULARY, HIDDEN = 50, 8


def heads():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(VOCABULARY, HIDDEN, generator=generator) for _ in range(2))
    return (lambda x: x @ first.T), (lambda x: x @ second.T)


def states(seed, rows=3, length=TOKENS):
    return torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def reference(teacher, student, wanted, hidden):
    log_p, log_q = teacher(wanted).log_softmax(-1), student(hidden).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def test_it_is_the_mean_over_all_positions_in_nats():
    teacher, student = heads()
    wanted, hidden = states(1, length=TOKENS + 7), states(2, length=TOKENS + 7)
    assert abs(kl(teacher, student, wanted, hidden) - reference(teacher, student, wanted, hidden).item()) < 1e-5


def test_it_is_zero_for_the_original_itself_and_only_then():
    teacher, student = heads()
    wanted = states(1)
    assert abs(kl(teacher, teacher, wanted, wanted)) < 1e-6
    assert kl(teacher, student, wanted, wanted) > 0.1


def test_the_gradient_is_autograds():
    teacher, student = heads()
    wanted, hidden = states(1, length=TOKENS + 7), states(2, length=TOKENS + 7)
    estimate, gradient = kl_gradient(teacher, student, wanted, hidden)
    leaf = hidden.clone().requires_grad_(True)
    reference(teacher, student, wanted, leaf).backward()
    assert gradient.shape == hidden.shape
    assert torch.allclose(gradient / hidden.shape[:2].numel(), leaf.grad, atol=1e-6)
    first = slice(0, TOKENS)  # one part in eight is looked at: here the first alone
    parts = [x.reshape(1, -1, HIDDEN)[:, first] for x in (wanted, hidden)]
    assert abs(estimate - reference(teacher, student, *parts).item()) < 1e-4


def test_no_gradient_where_both_agree():
    teacher, _ = heads()
    wanted = states(1)
    assert float(kl_gradient(teacher, teacher, wanted, wanted)[1].abs().max()) < 1e-5
