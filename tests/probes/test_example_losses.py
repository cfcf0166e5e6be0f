"""Every example has a loss of its own, the same in every pass, and measuring it leaves no trace."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from theodolite import UseError
from theodolite.probes.example_losses import disagreement, example_losses, losses_of
from theodolite.workloads import next_token_loss


def one_by_one(loss: Any, found: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([loss(found[i : i + 1], targets[i : i + 1]) for i in range(len(found))])


def looking(found: Tensor, targets: Tensor) -> Tensor:
    """A loss that vmap cannot take: it looks at a value."""
    return next_token_loss(found, targets) * (2.0 if found.max().item() > 0 else 1.0)


def ignoring(found: Tensor, targets: Tensor) -> Tensor:
    """A mean over the tokens that count, which are not as many in each example."""
    return F.cross_entropy(found.flatten(0, 1), targets.flatten(), ignore_index=2, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [next_token_loss, ignoring, looking])
def test_each_example_has_its_own_loss_and_gradient(loss: Any) -> None:
    found = torch.randn(4, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (4, 5))
    targets[1, :3] = 2
    mine, expected = example_losses(loss, found, targets), one_by_one(loss, found, targets)
    torch.testing.assert_close(mine, expected)
    weights = torch.randn(4, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(mine @ weights, found)
    (wanted,) = torch.autograd.grad(expected @ weights, found)
    torch.testing.assert_close(gradient, wanted)


def test_targets_may_be_several_tensors() -> None:
    def loss(found: Tensor, targets: Any) -> Tensor:
        return (targets["weight"] * (found - targets["value"]).square()).mean()

    found = torch.tensor([[1.0], [2.0]])
    targets = {"value": torch.tensor([[0.0], [5.0]]), "weight": torch.tensor([[1.0], [2.0]])}
    assert example_losses(loss, found, targets).tolist() == [1.0, 18.0]


class Small(nn.Module):
    """Normed by batch, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def test_losses_are_taken_in_eval_mode_and_leave_no_trace() -> None:
    model = Small().train()
    data = TensorDataset(torch.randn(7, 3), torch.randint(2, (7,)))
    loader = DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    told: list[float] = []
    randomness = torch.get_rng_state()
    found = losses_of(model, F.cross_entropy, loader, lambda title, done: told.append(done))
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is None and one.requires_grad for one in model.parameters())
    assert told == pytest.approx([1 / 3, 2 / 3, 1])
    again = losses_of(model, F.cross_entropy, loader)
    assert torch.equal(found, again), "a shuffled loader gives the same examples in every pass"
    every = one_by_one(F.cross_entropy, model.eval()(data.tensors[0]), data.tensors[1])
    torch.testing.assert_close(found.sort().values, every.detach().double().sort().values)


@pytest.mark.parametrize(
    ("found", "targets", "loss", "said"),
    [
        (
            torch.zeros(4, 2),
            torch.zeros(5),
            F.mse_loss,
            "the targets hold a tensor of shape (5,) beside logits",
        ),
        (torch.zeros(()), torch.zeros(()), F.mse_loss, "the logits are a tensor of shape ()"),
        (torch.zeros(4, 2), torch.zeros(4, 2), torch.sub, "not one number. Reduce it"),
        (
            torch.zeros(4, 2),
            torch.zeros(4, 3),
            F.cross_entropy,
            "the loss of one example, loss(logits[i:i+1]",
        ),
    ],
)
def test_what_has_no_loss_of_its_own_is_refused(found: Tensor, targets: Any, loss: Any, said: str) -> None:
    with pytest.raises(UseError, match=re.escape(said)):
        example_losses(loss, found, targets)


def test_bad_batches_are_refused() -> None:
    model, pair = nn.Linear(2, 1), (torch.zeros(2, 2), torch.zeros(2, 1))
    flat = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    with pytest.raises(UseError, match=re.escape("logits of shape (6,) of 2 examples")):
        losses_of(flat, F.mse_loss, (torch.zeros(2, 3, 2), torch.zeros(2, 3, 1)))
    bad = torch.zeros(2, 2), torch.tensor([[0.0], [torch.nan]])
    with pytest.raises(UseError, match="the loss of example 1 of batch 1 is nan"):
        losses_of(model, F.mse_loss, [pair, bad])
    assert losses_of(model, F.mse_loss, [pair, bad], finite=False).isnan().sum() == 1


def test_class_weights_that_cancel_in_a_batch_of_one_are_refused() -> None:
    found, targets, weight = torch.randn(64, 3), torch.randint(3, (64,)), torch.tensor([1.0, 10.0, 100.0])
    weighted = nn.CrossEntropyLoss(weight=weight)
    assert example_losses(weighted, found, targets).mean() == pytest.approx(
        float(F.cross_entropy(found, targets))
    )
    with pytest.raises(UseError, match=r"CrossEntropyLoss\(weight=…\) divides by the weights of the batch"):
        losses_of(nn.Identity(), weighted, (found, targets))

    def mean(found: Tensor, targets: Tensor) -> Tensor:
        return (weight[targets] * F.cross_entropy(found, targets, reduction="none")).mean()

    assert disagreement(mean, found, targets) is None
    assert disagreement(nn.CrossEntropyLoss(weight=weight, reduction="sum"), found, targets) is None
    assert disagreement(nn.BCEWithLogitsLoss(weight), found, found.sigmoid()) is None
    own = losses_of(nn.Identity(), mean, (found, targets))
    assert float(own.mean()) == pytest.approx(float(mean(found, targets)))


def test_examples_that_are_only_compared_with_each_other_have_no_loss() -> None:
    def contrast(found: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(found @ found.mT, torch.arange(len(found)))

    with pytest.raises(UseError, match=r"the loss of an example alone is 0, that of 64 together"):
        losses_of(nn.Identity(), contrast, (torch.randn(64, 3), torch.zeros(64)))


def test_examples_that_count_by_their_tokens_in_the_batch_are_told_of() -> None:
    found, targets = torch.zeros(2, 10, 5), torch.zeros(2, 10, dtype=torch.long)
    found[0, :, 0], targets[1, 1:] = 3.0, 2  # the second has one token that counts
    own = example_losses(ignoring, found, targets)
    together = (10 * own[0] + own[1]) / 11  # a mean over tokens
    said = disagreement(ignoring, found, targets)
    assert said is not None
    assert said.startswith(
        f"the mean over the examples' own losses, {own.mean():.3g}, differs from the loss of the batch, "
        f"{together:.3g}:"
    )
    assert disagreement(next_token_loss, found.bfloat16(), targets) is None
    assert losses_of(nn.Identity(), ignoring, (found, targets)).tolist() == pytest.approx(own.tolist())
