"""Ways to write the same network, and states it may be in, change nothing in what is said of its stream."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.probes.stream.growth import fit_growth
from theodolite.probes.stream.stream import stream
from theodolite.workloads import next_token_loss


class Sums(nn.Module):
    """`h + f(h)` with `f = W₂ relu(W₁ h)` in three blocks, the sum written in one of several ways."""

    def __init__(self, how: str = "plain", alpha: float = 1.0) -> None:
        super().__init__()
        self.how, self.alpha, self.skipped = how, alpha, -1
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            h = h if index == self.skipped else self.added(h, block)
        return self.last(h)

    def added(self, h: Tensor, block: nn.Module) -> Tensor:
        if self.how == "checkpointed":
            return checkpoint(lambda h: h + block(h), h, use_reentrant=True)
        branch = block(h)
        if self.how == "alpha":
            return torch.add(h, branch, alpha=self.alpha)
        if self.how == "into the branch":
            branch += h
            return branch
        if self.how == "into a view of it":
            branch.view(-1).add_(h.view(-1))
            return branch
        return h + self.alpha * branch


BATCH = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(32, 4)


@pytest.mark.parametrize("how", ["plain", "into the branch", "into a view of it"])
def test_without_a_branch_that_the_stream_is_added_to(how: str) -> None:
    model = Sums(how)
    found = stream(model, F.mse_loss, BATCH)
    for index in range(3):
        model.skipped = index
        changed = F.mse_loss(model(BATCH[0]), BATCH[1]).item() - found.loss
        assert found.skipped_blocks[index] == pytest.approx(changed, abs=1e-6)


def test_a_factor_of_the_addition_is_a_part_of_the_branch() -> None:
    one, other = Sums("alpha", -0.01), Sums("plain", -0.01)
    other.load_state_dict(one.state_dict())
    for seen, plain in zip(*(stream(it, F.mse_loss, BATCH).branches for it in (one, other)), strict=True):
        for name in ("added", "share", "cosine", "branch_gradient", "skipped"):
            assert getattr(seen, name) == pytest.approx(getattr(plain, name), rel=1e-4, abs=1e-7), name


def branched(first: nn.Module, branch: nn.Module, last: nn.Module) -> nn.Module:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.branch, self.last = first, branch, last

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(h + self.branch(h).relu())

    return Branched()


@pytest.mark.parametrize(
    "make, shape, channels",
    [
        (lambda one, two: nn.Conv1d(one, two, 1), (3, 2, 10), 1),
        (lambda one, two: nn.Conv2d(one, two, 1), (3, 2, 5, 7), 1),
        (nn.Linear, (3, 5, 7, 2), 3),  # maps with their channels last
        (nn.Linear, (3, 2), 1),
    ],
)
def test_directions_are_over_channels(make: object, shape: tuple[int, ...], channels: int) -> None:
    model, x = branched(make(2, 6), make(6, 6), make(6, 2)), torch.randn(shape)
    before = model.first(x)
    after = before + model.branch(before).relu()
    expected = F.cosine_similarity(before, after, dim=channels).mean().item()
    (reach,) = stream(model, F.mse_loss, (x, x), skip=False).branches
    assert reach.cosine == pytest.approx(expected, rel=1e-5)


def test_zeros_have_no_direction() -> None:
    model = branched(nn.Embedding(16, 8, padding_idx=0), nn.Linear(8, 8, bias=False), nn.Linear(8, 16))
    nn.init.normal_(model.branch.weight, std=1e-4)
    tokens = torch.tensor([[3, 4, 0, 0, 0, 0, 0, 0]])
    assert stream(model, next_token_loss, (tokens, tokens), skip=False).branches[0].cosine > 0.999


@pytest.mark.parametrize(
    "sizes",
    [
        [1, 1, 1, 1, 50, 50, 50, 50],
        [1, 1, 1, 1, 1, 1, 1, 50],
        [1, *[30] * 8],
        [1, 1, 100, 100, 100, 100, 100, 1.2],  # there and back
        [4, 100, 100, 100, 100, 1],
        [4, 7, 3, 1.5, 0.7, 0.3],
        [1, 60, 2, 70, 3, 80, 2, 100],
    ],
)
def test_a_jump_and_a_hump_follow_no_law(sizes: list[float]) -> None:
    found = fit_growth(sizes)
    assert found.kind == "unclear"
    assert "neither law fits" in str(found)


def test_in_a_mixture_no_branch_can_be_skipped() -> None:
    """Its key still has a score of zero, and so a weight."""
    tokens = torch.arange(16).reshape(2, 8)
    found = stream(th.models.GPT(32, 2, vocab=16, residual="routed"), next_token_loss, (tokens, tokens))
    assert {one.skipped for one in found.branches} == {None}
    assert found.skipped_blocks == (None, None)
    assert "no branch was skipped" in found.notes[0]


def test_in_inference_mode_and_without_gradients_as_ever() -> None:
    model = th.models.ResNet(8, 1).train()
    batch = torch.randn(4, 3, 8, 8), torch.arange(4)
    # By what they show: a cosine that is not defined is nan, which is not equal to itself.
    plain = repr(stream(model, F.cross_entropy, batch))
    with torch.no_grad():
        assert repr(stream(model, F.cross_entropy, batch)) == plain
    with torch.inference_mode():
        clones = batch[0].clone(), batch[1].clone()
        assert repr(stream(model, F.cross_entropy, clones)) == plain
        assert repr(stream(copy.deepcopy(model), F.cross_entropy, batch)) == plain


def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(UseError, match="use_reentrant=False"):
        stream(Sums("checkpointed"), F.mse_loss, BATCH)
