"""The loss against autograd on the formula as it is written in the paper."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eagle2.training.loss import Scorer, distillation_loss


def plain(predicted: torch.Tensor, truth: torch.Tensor, lm_head: torch.Tensor, weight: float) -> torch.Tensor:
    wanted = torch.softmax(truth @ lm_head.T, dim=-1)
    cross_entropy = -(wanted * torch.log_softmax(predicted @ lm_head.T, dim=-1)).sum(-1).mean()
    return F.smooth_l1_loss(predicted, truth) + weight * cross_entropy


@pytest.mark.parametrize("subset", [None, [3, 5, 6, 40]])
@pytest.mark.parametrize("rows", [1, 300])
def test_value_and_gradient_are_those_of_the_formula(subset: list[int] | None, rows: int) -> None:
    torch.manual_seed(0)
    lm_head, truth = torch.randn(50, 16) * 0.3, torch.randn(rows, 16)
    predicted, reference = (torch.randn(rows, 16).requires_grad_() for _ in range(2))
    reference.data.copy_(predicted.data)
    ids = None if subset is None else torch.tensor(subset)
    scored = lm_head if ids is None else lm_head[ids]
    loss = distillation_loss([predicted], truth, Scorer.of(lm_head, ids, torch.float32), cross_entropy_weight=0.3)
    loss.total.backward()
    wanted = plain(reference, truth, scored, 0.3)
    wanted.backward()
    torch.testing.assert_close(loss.total, wanted)
    torch.testing.assert_close(predicted.grad, reference.grad)
    assert loss.total.item() == pytest.approx(loss.regression[0] + 0.3 * loss.cross_entropy[0], rel=1e-5)


def test_each_pass_is_the_mean_over_its_own_rows() -> None:
    torch.manual_seed(0)
    lm_head, truth = torch.randn(50, 16) * 0.3, torch.randn(300, 16)
    passes, references = ([torch.randn(300, 16).requires_grad_() for _ in range(3)] for _ in range(2))
    for values, reference in zip(passes, references, strict=True):
        reference.data.copy_(values.data)
    counted = torch.rand(3, 300) < torch.tensor([[1.0], [0.6], [0.1]])
    loss = distillation_loss(passes, truth, Scorer.of(lm_head, None, torch.float32), counted, cross_entropy_weight=0.3)
    loss.total.backward()
    wanted = [plain(r[rows], truth[rows], lm_head, 0.3) for r, rows in zip(references, counted, strict=True)]
    torch.stack(wanted).sum().backward()
    torch.testing.assert_close(loss.total, torch.stack(wanted).sum())
    for values, reference in zip(passes, references, strict=True):
        torch.testing.assert_close(values.grad, reference.grad)


def test_bfloat16_products_stay_close() -> None:
    torch.manual_seed(0)
    lm_head, truth, predicted = torch.randn(500, 64) * 0.1, torch.randn(40, 64), torch.randn(40, 64)
    exact, rounded = (
        distillation_loss([predicted.clone().requires_grad_()], truth, Scorer.of(lm_head, None, dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded.cross_entropy[0] == pytest.approx(exact.cross_entropy[0], rel=0.01)


def test_a_perfect_prediction_has_no_gradient() -> None:
    truth = torch.randn(5, 16)
    predicted = truth.clone().requires_grad_()
    loss = distillation_loss([predicted], truth, Scorer.of(torch.randn(30, 16), None, torch.float32))
    loss.total.backward()
    assert loss.regression == (0,)
    assert predicted.grad is not None
    assert predicted.grad.abs().max() < 1e-6
