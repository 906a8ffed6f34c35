"""The fused distillation loss equals the plain one, value and gradients."""

import pytest
import torch

from compressor.train import loss
from compressor.train.loss import distill


def inputs(steps=2, rows=9, width=8, size=12):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    scale = torch.rand(steps, rows, generator=generator)
    labels = torch.randint(-1, size, (rows,), generator=generator)
    return normal(steps, rows, width), normal(size, width), normal(rows, 5), normal(size, 5), scale, labels


def plain(states, weight, teacher, teacher_weight, scale):
    wanted = (teacher @ teacher_weight.T).softmax(-1)
    return -(scale * (wanted * (states @ weight.T).log_softmax(-1)).sum(-1)).sum()


@pytest.mark.parametrize("chunk", [4, 1024])
def test_value_and_gradients_are_those_of_autograd(chunk, monkeypatch):
    monkeypatch.setattr(loss, "ROWS", chunk)
    states, weight, teacher, teacher_weight, scale, labels = inputs()
    ours = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
    value, _ = distill(*ours, teacher, teacher_weight, scale, labels)
    expected = plain(*theirs, teacher, teacher_weight, scale)
    (3 * value).backward()
    (3 * expected).backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_under_autocast_only_the_products_are_rounded():
    """To bfloat16; in the value of many rows that averages out."""
    states, weight, teacher, teacher_weight, scale, labels = inputs(rows=400, size=300)
    leaf = states.clone().requires_grad_()
    exact = states.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value, _ = distill(leaf, weight, teacher, teacher_weight, scale, labels)
    value.backward()
    expected = plain(exact, weight, teacher, teacher_weight, scale)
    expected.backward()
    assert value.dtype == leaf.grad.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=2e-4) and value.item() != expected.item()
    assert float((leaf.grad - exact.grad).norm() / exact.grad.norm()) < 0.01


def test_a_gradient_of_other_weights_would_be_seen():
    """Control of the comparison above: twice the scale of one row changes the gradient beyond its tolerance."""
    states, weight, teacher, teacher_weight, scale, labels = inputs()
    grads = []
    for factor in (1.0, 2.0):
        leaf = states.clone().requires_grad_()
        changed = scale.clone()
        changed[0, 0] *= factor
        distill(leaf, weight, teacher, teacher_weight, changed, labels)[0].backward()
        grads.append(leaf.grad)
    assert not torch.allclose(grads[0], grads[1], atol=1e-5)


def test_it_tells_which_labels_are_the_most_probable():
    states, weight, teacher, teacher_weight, scale, _ = inputs()
    labels = (states[1] @ weight.T).argmax(-1)
    labels[4] = -1  # outside the vocabulary
    _, right = distill(states, weight, teacher, teacher_weight, scale, labels)
    assert right[1].tolist() == [row != 4 for row in range(9)]
    assert torch.equal(right[0], (states[0] @ weight.T).argmax(-1) == labels)


def test_it_computes_no_gradient_where_none_is_wanted():
    states, weight, teacher, teacher_weight, scale, labels = inputs()
    with torch.no_grad():
        value, _ = distill(states.requires_grad_(), weight, teacher, teacher_weight, scale, labels)
    assert not value.requires_grad


def test_rows_of_scale_zero_teach_nothing():
    states, weight, teacher, teacher_weight, scale, labels = inputs()
    scale[:, 3] = 0
    leaf = states.clone().requires_grad_()
    distill(leaf, weight, teacher, teacher_weight, scale, labels)[0].backward()
    assert not leaf.grad[:, 3].any() and leaf.grad[:, 2].any()
